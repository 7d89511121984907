"""nginx, as other people have it, serving a directory on loopback: what transfers are measured from."""

from __future__ import annotations

import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.system.daemons import free_port, wait_for


class NoProgram(Exception):
    """A program that a measurement needs is not installed; the text names it and says what to do."""


def program(name: str) -> str:
    """The path of a program.

    :raises NoProgram: if it is not installed.
    """
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    if path is None:
        raise NoProgram(f"{name} is not installed; on Debian: apt install {name}")
    return path


@contextmanager
def nginx(scratch: Path, locations: str) -> Iterator[str]:
    """The URL of an nginx of its own with these ``location`` blocks; ``scratch`` is its directory."""
    port = free_port()
    scratch.mkdir(parents=True, exist_ok=True)
    temporary = "\n".join(
        f"{kind}_temp_path {scratch}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    configuration = scratch / "nginx.conf"
    configuration.write_text(
        f"daemon off; pid {scratch}/pid; error_log {scratch}/error.log; worker_processes 1; user root;\n"
        f"events {{ worker_connections 1024; }}\n"
        f"http {{ access_log {scratch}/access.log; sendfile on; tcp_nopush on; {temporary}\n"
        f"server {{ listen 127.0.0.1:{port} backlog=1024; {locations} }} }}\n"
    )
    process = subprocess.Popen([program("nginx"), "-c", str(configuration)], stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: _answers(url) or process.poll() is not None, "nginx")
        if process.poll() is not None:
            raise NoProgram(f"nginx did not start: {(scratch / 'error.log').read_text()[-500:]}")
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
