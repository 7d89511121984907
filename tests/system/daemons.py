"""Real daemons for tests and measurements: started as an operator would, told apart from others by their own directory.

Everything blocks and everything has a deadline; what was started is ended, whatever the test does.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
BIN: Final = Path(sys.executable).parent
READY_SECONDS: Final = 120.0
WAIT_SECONDS: Final = 120.0


class NotInTime(AssertionError):
    """What was waited for did not happen; the text has what was seen last."""


def make_directory() -> Path:
    """A directory that the database's user can enter as well, with a path short enough for sockets."""
    directory = Path(tempfile.mkdtemp(prefix="stanchion-sys-", dir="/var/tmp"))
    directory.chmod(0o755)
    return directory


def wait_for(condition: Callable[[], Any], what: str | Callable[[], str], seconds: float = WAIT_SECONDS) -> Any:
    """The first true value of ``condition``, asked for a few times a second.

    :raises NotInTime: after ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise NotInTime(f"waited {seconds:g} s for {what() if callable(what) else what}; last seen: {value!r}")
        # The daemons cannot tell a test what they do, so it has to look again; nothing is asserted about the time.
        _pause(0.05)


def _pause(seconds: float) -> None:
    reading, writing = socket.socketpair()
    with reading, writing:
        reading.settimeout(seconds)
        try:
            reading.recv(1)
        except TimeoutError:
            return


class Daemon:
    """One daemon, ``twistd -n NAME --config FILE``, in ``directory``."""

    program: tuple[str, ...] = ()
    """What Python runs in place of twistd, before the settings' file."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.directory = directory
        self.config = directory / f"{name}.toml"
        self.log = directory / f"{name}.log"
        self.status = ""
        self.process: subprocess.Popen[bytes] | None = None
        self._notify: socket.socket | None = None

    def write_config(self, text: str) -> None:
        self.config.write_text(text)

    @property
    def command_line(self) -> list[str | Path]:
        if self.program:
            return [sys.executable, *self.program, self.config]
        twistd: list[str | Path] = [BIN / "twistd", "-n", "--pidfile=", "--logger", "rpc.logs.observer"]
        return [*twistd, self.name, "--config", self.config]

    def start(self, *, environment: Mapping[str, str] | None = None) -> None:
        """Start it and wait until it says that it is ready."""
        address = self.directory / f"{self.name}.notify"
        address.unlink(missing_ok=True)
        if self._notify is not None:
            self._notify.close()
        self._notify = notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        notify.bind(str(address))
        with open(self.log, "ab") as output:
            self.process = subprocess.Popen(
                self.command_line,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, **(environment or {}), "NOTIFY_SOCKET": str(address)},
            )
            deadline = time.monotonic() + READY_SECONDS
            notify.settimeout(0.2)
            while True:
                try:
                    lines = notify.recv(4096).decode().splitlines()
                except TimeoutError:
                    lines = []
                for line in lines:
                    key, _, value = line.partition("=")
                    if key == "STATUS":
                        self.status = value
                if "READY=1" in lines:
                    return
                if self.process.poll() is not None:
                    raise AssertionError(f"{self.name} ended with {self.process.returncode}:\n{self.tail()}")
                if time.monotonic() > deadline:
                    raise NotInTime(f"{self.name} did not become ready:\n{self.tail()}")

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text("utf-8", "replace").splitlines()[-lines:])

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(WAIT_SECONDS)

    def stop(self) -> float:
        """SIGTERM; the seconds that it took to end."""
        assert self.process is not None
        begun = time.monotonic()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(WAIT_SECONDS)
        return time.monotonic() - begun

    @property
    def resident(self) -> int:
        """Bytes of memory that are its own or shared with others, now."""
        return _status(self.pid, "VmRSS") * 1024

    @property
    def peak(self) -> int:
        """The most that :attr:`resident` ever was."""
        return _status(self.pid, "VmHWM") * 1024


def _status(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise AssertionError(f"no {name} of process {pid}")


class Region(Daemon):
    """A region with everything on loopback, on free ports that stay the same over restarts."""

    def __init__(self, directory: Path, settings: str = "", images: str = "", top: str = "") -> None:
        super().__init__("region", directory)
        self.key = ""
        self.http = free_port()
        self.rpc = free_port()
        self.write_config(
            f'state_directory = "{directory}/region"\n{top}\n'
            f'[http]\nlisten = "127.0.0.1"\nport = {self.http}\n'
            f'[rpc]\nlisten = "127.0.0.1"\nport = {self.rpc}\n'
            f"[images]\nat_start = false\ninterval_minutes = 0\n{images}\n{settings}\n"
        )

    def kill(self) -> None:
        """kill -9, and wait until its PostgreSQL, which ends with it, has ended too."""
        data = self.directory / "region" / "postgres" / "data"
        try:
            postmaster = int((data / "postmaster.pid").read_text().split()[0])
        except (FileNotFoundError, IndexError):
            postmaster = 0
        super().kill()
        if postmaster:
            wait_for(lambda: not Path(f"/proc/{postmaster}").exists(), "PostgreSQL to end")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http}/MAAS"

    def command(self, *arguments: str, status: int = 0) -> str:
        """Run ``stanchion ARGUMENTS``; its standard output."""
        environment = {**os.environ, "STANCHION_URL": self.url, "STANCHION_KEY": self.key}
        run = subprocess.run(
            [BIN / "stanchion", *arguments], capture_output=True, text=True, timeout=WAIT_SECONDS, env=environment
        )
        if run.returncode != status:
            raise AssertionError(
                f"stanchion {' '.join(arguments)} ended with {run.returncode}: {run.stdout}{run.stderr}"
            )
        return run.stdout

    def make_key(self) -> None:
        self.key = json.loads(self.command("region", "apikey", "--json", "--config", str(self.config)))["key"]

    def join_token_for(self, racks: int) -> str:
        token: str = json.loads(
            self.command("region", "join-token", "--json", "--uses", str(racks), "--config", str(self.config))
        )["token"]
        return token

    def stream(self, path: str) -> bytes:
        """What is at ``path`` in the image stream."""
        with urllib.request.urlopen(f"{self.url}/images-stream/{path}", timeout=30) as answer:
            data: bytes = answer.read()
        return data

    def api(
        self, path: str, method: str = "GET", fields: Mapping[str, Any] | None = None, *, timeout: float = 30.0
    ) -> tuple[int, Any, Any]:
        """Status, body (parsed if it is JSON) and headers of the answer."""
        request = urllib.request.Request(
            f"{self.url}/api/2.0/{path}",
            method=method,
            data=None if fields is None else urllib.parse.urlencode(fields, doseq=True).encode(),
            headers={"Authorization": authorization(self.key)},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.status, _body(answer), answer.headers
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _body(error), error.headers

    def get(self, path: str) -> Any:
        status, body, _ = self.api(path)
        assert status == 200, f"GET {path}: {status} {body}"
        return body

    def add_source(self, url: str, keyring: bytes = b"", **fields: Any) -> int:
        trust = {"keyring_data": base64.b64encode(keyring).decode()} if keyring else {"allow_unsigned": "true"}
        status, body, _ = self.api("boot-sources/", "POST", {"url": url, **trust, **fields})
        assert status in (200, 201), f"adding {url}: {status} {body}"
        identifier: int = body["id"]
        status, body, _ = self.api(f"boot-sources/{identifier}/selections/", "POST", {"os": "*", "release": "*"})
        assert status in (200, 201), f"selecting: {status} {body}"
        return identifier

    def newest_job(self) -> Any:
        jobs = self.get("import-jobs/")
        return jobs[0] if jobs else None

    def start_import(self) -> int:
        status, body, headers = self.api("boot-resources/?op=import", "POST", {})
        assert status == 200, f"importing: {status} {body}"
        return int(headers["Location"].rstrip("/").rpartition("/")[2])

    def job(self, number: int) -> Any:
        return self.get(f"import-jobs/{number}/")

    def run_import(self, seconds: float = WAIT_SECONDS) -> Any:
        """Import, and wait until that has ended; the job."""
        number = self.start_import()
        return wait_for(
            lambda: (job := self.job(number))["state"] in ("done", "failed", "cancelled") and job, "the import", seconds
        )


class Rack(Daemon):
    """A rack of ``region``."""

    def __init__(self, region: Region, directory: Path, name: str = "rack-1") -> None:
        super().__init__("rack", directory)
        self.region = region
        self.rack_name = name
        self.write_config(f'state_directory = "{directory}/rack"\n')

    def join(self) -> None:
        self.region.command(
            "rack", "join", "--config", str(self.config), "--region", f"127.0.0.1:{self.region.rpc}",
            "--name", self.rack_name, self.region.join_token_for(1),
        )  # fmt: skip

    def is_in_step(self) -> bool:
        """Whether the region knows this rack to hold the current generation."""
        generations = self.region.get("image-generations/")
        racks = [rack for rack in self.region.get("rackcontrollers/") if rack["hostname"] == self.rack_name]
        return bool(generations and racks) and racks[0]["digest"] == generations[0]["digest"]

    def wait_in_step(self, seconds: float = WAIT_SECONDS) -> None:
        wait_for(self.is_in_step, f"{self.rack_name} to be in step", seconds)

    @property
    def snapshot(self) -> Path:
        """The directory that ``current`` names."""
        return (self.directory / "rack" / "images" / "current").resolve()


def free_port() -> int:
    """A port on loopback that nobody has at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def authorization(key: str) -> str:
    """The OAuth 1.0 PLAINTEXT header for a three-part key."""
    consumer, token, secret = key.split(":") if key else ("", "", "")
    fields = {
        "oauth_consumer_key": consumer, "oauth_token": token, "oauth_signature_method": "PLAINTEXT",
        "oauth_signature": f"&{secret}", "oauth_timestamp": str(int(time.time())),
        "oauth_nonce": os.urandom(8).hex(), "oauth_version": "1.0",
    }  # fmt: skip
    return "OAuth " + ", ".join(f'{name}="{urllib.parse.quote(value, safe="")}"' for name, value in fields.items())


def _body(answer: Any) -> Any:
    data = answer.read()
    if answer.headers.get_content_type() == "application/json":
        return json.loads(data)
    return data.decode("utf-8", "replace")


@contextmanager
def directory() -> Iterator[Path]:
    """A fresh directory, removed at the end."""
    path = make_directory()
    try:
        yield path
    finally:
        shutil.rmtree(path)
