"""``stanchion login``: keep an address and a key, after trying them."""

from __future__ import annotations

import argparse
import sys

from rpc.client import Client
from rpc.console import write, write_json
from rpc.profile import Profile, base_url, profile_path, save_profile


def run(arguments: argparse.Namespace) -> int:
    """Try the key and write the profile."""
    key = sys.stdin.readline().strip() if arguments.key == "-" else arguments.key
    profile = Profile(base_url(arguments.url), key)
    Client(profile).get("boot-sources/")
    path = profile_path()
    save_profile(path, profile)
    if arguments.json:
        write_json({"url": profile.url, "profile": str(path)})
    else:
        write(f"{profile.url} accepts the key; both are kept in {path}")
    return 0
