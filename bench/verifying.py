"""What hashing all files again in the background costs the region, at the rate that it has unless told otherwise."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bench.processor import seconds_of
from bench.table import Figure
from tests.streams import Stream
from tests.system.daemons import Region, wait_for

SECONDS = 15.0
MIB = 1 << 20


def _share(region: Region) -> float:
    """The share of a core that the region takes for a while."""
    begun, spent = time.monotonic(), seconds_of(region.pid)
    time.sleep(SECONDS)
    return (seconds_of(region.pid) - spent) / (time.monotonic() - begun)


def measure(scratch: Path) -> Iterator[Figure]:
    """The figure, of a region that has 240 MiB to verify: for 20 seconds at 12 MiB in each."""
    directory = scratch / "verifying"
    directory.mkdir()
    directory.chmod(0o755)
    stream = Stream(directory / "stream", signer=None)
    generator = random.Random(1)
    for arch in ("amd64", "arm64", "armhf"):
        stream.add("bookworm", arch, files={"squashfs": generator.randbytes(80 * MIB)}, os="debian")
    stream.write()
    region = Region(directory)
    region.start()
    try:
        region.make_key()
        region.add_source((directory / "stream").as_uri() + "/")
        wait_for(lambda: (region.newest_job() or {}).get("state") == "done", "the import")
        idle = _share(region)
        status, body, _ = region.api("image-verification/", "POST", {})
        if status not in (200, 202):
            raise RuntimeError(f"verifying: {status} {body}")
        wait_for(partial(_is_verifying, region), "the verification to begin")
        busy = _share(region)
        found = region.get("image-verification/")
        if found["state"] != "verifying":
            raise RuntimeError(f"the verification ended too soon: {found}")
    finally:
        region.stop()
    yield Figure(
        "verifying files, at its own rate", (busy - idle) * 100, " %", 5.0, False,
        f"of a core; the region took {busy * 100:.2f} % verifying, {idle * 100:.2f} % idle",
    )  # fmt: skip


def _is_verifying(region: Region) -> bool:
    found: dict[str, object] = region.get("image-verification/")
    return found["state"] == "verifying"
