"""How scripts get their packages, with commands that only pretend; and what is said when that fails."""

from __future__ import annotations

import io
import os
import socket
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

import node.packages
from node.archive import Script
from node.clock import Clock
from node.console import Console
from node.executing import Executor, Finished
from node.packages import BadPackages, Command, Download, fetch, steps, unpack_or_install
from node.running import Ended, Outputs, run
from node.tally import Tally
from tests.examples import examples


class StepsTests(SynchronousTestCase):
    def commands(self, packages: Any) -> list[str]:
        return [" ".join(step.words) if isinstance(step, Command) else step.url for step in steps(packages)]

    def test_each_kind_has_its_command(self) -> None:
        apt = "apt-get --quiet --yes -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3"
        self.assertEqual(
            self.commands(
                {
                    "apt": ["a", "b=1.0"],
                    "snap": ["c", {"name": "d", "channel": "edge", "mode": "classic"}, {"name": "e"}],
                    "url": "http://x/y.tar",
                }
            ),
            [f"{apt} update", f"{apt} install --no-install-recommends -- a b=1.0", "snap install c",
             "snap install d --channel=edge --classic", "snap install e", "http://x/y.tar"],
        )  # fmt: skip
        self.assertEqual(self.commands({"apt": []}), [])

    def test_what_makes_no_sense_is_named(self) -> None:
        for packages, words in (
            ({"rpm": ["x"]}, "'rpm' is no kind of packages"), ({"apt": ["--force"]}, "'--force' is no apt package"),
            ({"apt": [3]}, "3 is no apt"), ({"snap": [{"name": "x", "mode": "y"}]}, "'y' is no mode"),
            ({"snap": [{}]}, "None is no snap"), ({"url": ["file:///etc/passwd"]}, "no http(s) URL"),
        ):  # fmt: skip
            error = self.assertRaises(BadPackages, self.commands, packages)
            self.assertIn(words, str(error))

    @examples(40)
    @given(st.dictionaries(st.sampled_from(["apt", "snap", "url", "x"]), st.none() | st.lists(st.text(max_size=4)) |
                           st.dictionaries(st.text(max_size=4), st.text(max_size=4))))  # fmt: skip
    def test_whatever_there_is_are_commands_or_a_reason(self, packages: Any) -> None:
        try:
            found = list(steps(packages))
        except BadPackages as error:
            self.assertTrue(str(error))
        else:
            for step in found:
                self.assertIsInstance(step, (Command, Download))


class Served(ThreadingHTTPServer):
    """Serves files by name; the first ``failures`` requests are answered with 500."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes], failures: int = 0) -> None:
        self.asked = 0
        served = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                served.asked += 1
                data = files.get(self.path.lstrip("/"))
                if served.asked <= failures or data is None:
                    self.send_error(500 if data is not None else 404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(data) + (100 if "cut" in self.path else 0)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *arguments: Any) -> None:
                return

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def close(self) -> None:
        self.shutdown()
        self.server_close()


def packed(*members: tarfile.TarInfo | tuple[str, bytes]) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size, info.mode = len(member[1]), 0o755
                tar.addfile(info, io.BytesIO(member[1]))
    return data.getvalue()


class FetchTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = self.mktemp()
        os.makedirs(self.directory)
        self.pauses: list[float] = []
        self.complaints: list[str] = []

    def serve(self, files: dict[str, bytes], failures: int = 0) -> Served:
        served = Served(files, failures)
        self.addCleanup(served.close)
        return served

    def fetch(self, url: str, seconds: float = 60.0) -> str:
        return fetch(url, self.directory, self.pauses.append, iter(range(100)).__next__, seconds)

    def unpack(self, name: str, data: bytes) -> list[str]:
        path = Path(self.directory, name)
        path.write_bytes(data)
        commands = unpack_or_install(str(path), self.directory, self.complaints.append)
        path.unlink(missing_ok=True)
        return [" ".join(command.words).replace(str(path), "FILE") for command in commands]

    def test_a_file_comes_after_a_server_that_failed_for_a_moment(self) -> None:
        served = self.serve({"a%20b.tar": b"data"}, failures=2)
        self.assertEqual(Path(self.fetch(served.url + "a%20b.tar")).read_bytes(), b"data")
        self.assertEqual(self.pauses, [2.0, 4.0])

    def test_what_does_not_come_says_why(self) -> None:
        served = self.serve({"cut": b"data"})
        for path, words, asked in (("missing", "404", 1), ("cut", "104 bytes", 3)):
            del self.pauses[:]
            error = self.assertRaises(BadPackages, self.fetch, served.url + path)
            self.assertIn(f"{served.url}{path} cannot be fetched", str(error))
            self.assertEqual(len(self.pauses), asked - 1, words)
        self.assertEqual([name for name in os.listdir(self.directory) if not name.endswith(".part")], [])

    def test_one_that_is_of_no_use_any_more_is_given_up_at_once(self) -> None:
        served = self.serve({"big": bytes(300_000)})
        asked = iter([False] + [True] * 9)
        error = self.assertRaises(
            BadPackages, fetch, served.url + "big", self.directory, self.pauses.append, lambda: 0.0,
            is_stopped=asked.__next__,
        )  # fmt: skip
        self.assertIn("it was told to stop", str(error))
        self.assertEqual(self.pauses, [])

    def test_a_server_that_answers_by_the_byte_is_given_up(self) -> None:
        self.patch(node.packages, "ANSWER_SECONDS", 0.2)
        self.patch(node.packages, "ATTEMPTS", 1)
        let_go = threading.Event()
        self.addCleanup(let_go.set)
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen()

            def serve() -> None:
                peer, _ = server.accept()
                with peer:
                    while not let_go.wait(0.05):
                        peer.sendall(b"x")

            threading.Thread(target=serve, daemon=True).start()
            url = f"http://127.0.0.1:{server.getsockname()[1]}/x"
            error = self.assertRaises(BadPackages, self.fetch, url)
        self.assertIn("no whole answer within", str(error))

    def test_one_that_comes_too_slowly_is_given_up(self) -> None:
        served = self.serve({"big": bytes(300_000)})
        error = self.assertRaises(BadPackages, self.fetch, served.url + "big", 1.0)
        self.assertIn("too slowly", str(error))

    def test_what_is_a_package_is_installed(self) -> None:
        self.assertEqual(
            self.unpack("x.deb", b""), ["dpkg --install FILE", "apt-get --quiet --yes --fix-broken install"]
        )
        self.assertEqual(self.unpack("x.snap", b""), ["snap install --dangerous FILE"])

    def test_what_is_an_archive_is_unpacked_and_nothing_leads_out(self) -> None:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        self.assertEqual(self.unpack("x.tar.gz", packed(("d/tool", b"#!"), ("../out", b""), link)), [])
        self.assertTrue(os.access(os.path.join(self.directory, "d", "tool"), os.X_OK))
        self.assertEqual(sorted(os.listdir(self.directory)), ["d"])
        self.assertEqual(len(self.complaints), 2)
        data = io.BytesIO()
        with zipfile.ZipFile(data, "w") as zipped:
            zipped.writestr("z/file", b"x")
        self.unpack("x.zip", data.getvalue())
        self.assertEqual(sorted(os.listdir(self.directory)), ["d", "z"])
        with zipfile.ZipFile(data, "w") as zipped:
            zipped.writestr("../out", b"x")
        self.assertIn("leads out", str(self.assertRaises(BadPackages, self.unpack, "x.zip", data.getvalue())))

    def test_what_is_neither_stays_as_it_is_and_one_that_is_cut_says_so(self) -> None:
        self.assertEqual(self.unpack("x.bin", b"data"), [])
        error = self.assertRaises(BadPackages, self.unpack, "x.tar.gz", packed(("a", os.urandom(50_000)))[:30_000])
        self.assertIn("cannot be unpacked", str(error))


class InstallTests(SynchronousTestCase):
    """With real commands named apt-get and snap, first on the PATH."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp()).resolve()
        (self.directory / "bin").mkdir(parents=True)
        self.patch(os, "environ", {**os.environ, "PATH": f"{self.directory}/bin:{os.environ['PATH']}"})
        self.log = self.directory / "commands"
        self.log.touch()
        self.lines: list[str] = []
        self.begins: list[str] = []

    def command(self, name: str, lines: str) -> None:
        path = self.directory / "bin" / name
        path.write_text(f'#!/bin/sh\necho "{name} $DEBIAN_FRONTEND $*" >> {self.log}\n{lines}\n')
        path.chmod(0o755)

    def run_with(self, packages: dict[str, Any]) -> Finished:
        clock = Clock()
        console = Console([lambda level, line: self.lines.append(line)])

        def execute(words: list[str], outputs: Outputs, environment: Any, where: str, limit: float, stop: Any) -> Ended:
            return run(words, outputs, environment, where, limit, stop)

        executor = Executor(
            str(self.directory / "kept"), console, Tally(clock.now), execute, clock.event(), clock,
            lambda script, status, message: self.begins.append(f"{status} {message}"),
        )  # fmt: skip
        script = self.directory / "script"
        script.write_text("#!/bin/sh\necho it runs; ls $DOWNLOAD_PATH\n")
        script.chmod(0o755)
        return executor.run(Script("testing", "stress", str(script), 7, packages=packages), False)

    def test_packages_are_there_before_the_script_runs(self) -> None:
        self.command("apt-get", "echo installing")
        self.command("snap", "echo snapping")
        served = Served({"tool.tar.gz": packed(("tool", b"x"))})
        self.addCleanup(served.close)
        finished = self.run_with({"apt": ["a"], "snap": ["b"], "url": [served.url + "tool.tar.gz"]})
        self.assertTrue(finished.record["passed"], finished)
        self.assertEqual(finished.files[0].content, b"it runs\ntool\ntool.tar.gz\n")
        self.assertEqual(self.begins, ["INSTALLING installing packages for stress", "WORKING running stress"])
        commands = self.log.read_text().splitlines()
        self.assertEqual([line.split()[0] for line in commands], ["apt-get", "apt-get", "snap"])
        self.assertTrue(all("noninteractive" in line for line in commands[:2]))

    def test_a_command_that_fails_is_the_installations_failure_with_what_it_said(self) -> None:
        self.command("apt-get", 'echo "E: no network" >&2; case "$*" in *update*) exit 0;; esac; exit 100')
        finished = self.run_with({"apt": ["a"]})
        self.assertEqual((finished.status, finished.fields["exit_status"]), ("INSTALLING", 100))
        self.assertFalse(finished.record["passed"])
        self.assertIn("install --no-install-recommends -- a failed with exit status 100", finished.record["message"])
        self.assertEqual(finished.files[0].content.count(b"E: no network"), 2)
        self.assertEqual(self.begins, ["INSTALLING installing packages for stress"])

    def test_packages_that_make_no_sense_or_commands_that_are_not_there_too(self) -> None:
        finished = self.run_with({"apt": ["-x"]})
        self.assertEqual((finished.status, finished.fields["exit_status"]), ("INSTALLING", 1))
        self.patch(os, "environ", {"PATH": f"{self.directory}/bin"})
        finished = self.run_with({"snap": ["x"]})
        self.assertEqual((finished.status, finished.fields["exit_status"]), ("INSTALLING", 2))
        self.assertIn("snap cannot be executed: No such file or directory", finished.record["message"])
