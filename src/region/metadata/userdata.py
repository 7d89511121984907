"""What does a machine run that asks for its user-data? MIME multipart with one shell script that starts the runner.

The runner is the package ``node`` as a zipapp (PEP 441), inside the script itself: a machine that could fetch its
user-data has all that it needs, and no second download can fail.
"""

from __future__ import annotations

import base64
import io
import textwrap
import zipfile
from email.mime.multipart import MIMEMultipart
from email.mime.text import MIMEText
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Final

BOUNDARY: Final = "==stanchion-user-data=="
"""Always the same one, so that equal user-data is equal bytes; it is no line of base64, nor of the script."""

_START: Final = """\
#!/bin/sh
# Stanchion: runs the scripts that the region has for this machine, and reports each to it.
set -u
umask 077
# Without the runner nobody tells the region why, until it gives this machine up: so it is said in both places where a
# person looks, cloud-init's log and the console. Where there is no console, the log alone has it.
fail() {{
    echo "stanchion: $1, so the scripts of this machine cannot be run" >&2
    {{ echo "stanchion: $1, so the scripts of this machine cannot be run" > /dev/console; }} 2> /dev/null
    exit "$2"
}}
# mktemp puts characters of its own in the place of each X. The directory is this user's alone.
directory=$(mktemp -d /tmp/stanchion-XXXXXX) || fail "no directory for the runner can be made in /tmp" 1
trap 'rm -rf "$directory"' EXIT
if ! base64 -d > "$directory/runner.pyz" <<'STANCHION_RUNNER'
{archive}
STANCHION_RUNNER
then
    fail "the runner cannot be written to $directory" 1
fi
for python in python3 /usr/libexec/platform-python; do
    command -v "$python" > /dev/null 2>&1 || continue
    # A runner that is taken down with its parent would lose what it has not sent yet: it keeps that on the disk.
    attempt=1
    while :; do
        "$python" "$directory/runner.pyz" "$@"
        status=$?
        # ABRT, BUS, KILL and SEGV: who is told to end, ends.
        case "$status" in 134|135|137|139) [ "$attempt" -lt 20 ] || exit "$status" ;; *) exit "$status" ;; esac
        # A script killed it, or it was killed for want of memory: it goes on where it was, and knows how often.
        attempt=$((attempt + 1))
        echo "stanchion: the runner was killed (exit status $status); it is started again" >&2
        sleep 1
    done
done
fail "there is no python3 on this machine" 127
"""


@cache
def runner_archive() -> bytes:
    """The runner as a zipapp: the package ``node`` with all its files. The same bytes each time."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:

        def add(name: str, data: bytes) -> None:
            # Fixed times and modes: the archive depends on nothing but what is in it.
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data)

        for name, file in _files(resources.files("node"), "node"):
            add(name, file.read_bytes())
        add("__main__.py", b"import runpy\n\nrunpy.run_module('node', run_name='__main__', alter_sys=True)\n")
    return packed.getvalue()


def _files(directory: Traversable, prefix: str) -> list[tuple[str, Traversable]]:
    """What is in a package that the runner needs: its modules. The scripts it runs come from the region."""
    found: list[tuple[str, Traversable]] = []
    for entry in sorted(directory.iterdir(), key=lambda entry: entry.name):
        name = f"{prefix}/{entry.name}"
        if entry.is_dir() and entry.name not in ("__pycache__", "builtin"):
            found += _files(entry, name)
        elif entry.is_file() and entry.name.endswith(".py"):
            found.append((name, entry))
    return found


@cache
def user_data() -> bytes:
    """The user-data of a machine whose scripts are to be run."""
    archive = "\n".join(textwrap.wrap(base64.b64encode(runner_archive()).decode("ascii"), 76))
    script = MIMEText(_START.format(archive=archive), "x-shellscript", "us-ascii")
    script.add_header("Content-Disposition", "attachment", filename="user_data.sh")
    message = MIMEMultipart(boundary=BOUNDARY)
    message.attach(script)
    return message.as_bytes()
