"""The program as a whole, as far as it goes without a region; tests.system.test_runner has the rest."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import signal
import socket
import stat
import sys
import threading
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

import node.priority
from node import __main__ as program
from node.console import Console
from node.credentials import Credentials
from node.priority import Priority
from node.runner import Options
from tests.node.hostile import CREDENTIALS_PARTS
from tests.node.test_packages import Served
from tests.node.virtual import VirtualClock

CONFIG = "metadata_url: {}\nconsumer_key: ck\ntoken_key: tk\ntoken_secret: ts\n"


class MainTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.lines: list[str] = []
        self.console = Console([lambda level, line: self.lines.append(line)])
        self.directory = self.mktemp()
        # A test must not become the most important process of the machine that it runs on.
        self.patch(Priority, "protect", lambda priority: None)
        self.patch(signal, "signal", lambda number, handler: None)
        self.patch(program, "Runner", self.make)
        self.kept_in: list[str] = []
        self.outcome: Any = 0

    def make(self, client: Any, directory: str, *arguments: Any, **more: Any) -> Any:
        class Fake:
            def run(fake) -> int:
                if isinstance(self.outcome, OSError):
                    raise self.outcome
                return int(self.outcome)

        self.kept_in.append(directory)
        return Fake()

    def start(self) -> int:
        return program.start(Credentials("http://region/", *CREDENTIALS_PARTS), self.console, self.directory, Options())

    def test_each_token_has_a_directory_of_its_own_that_nobody_else_may_read(self) -> None:
        self.outcome = 1
        self.assertEqual(self.start(), 1)
        [kept] = self.kept_in
        self.assertEqual(os.path.dirname(kept), self.directory)
        self.assertNotIn(CREDENTIALS_PARTS[1], kept)
        self.assertEqual(stat.S_IMODE(os.stat(kept).st_mode), 0o700)

    def test_only_one_runs_at_a_time(self) -> None:
        self.start()
        with open(os.path.join(self.kept_in[0], "lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.assertEqual(self.start(), 3)
        self.assertIn("another runner is at work for this machine", self.lines[-1])
        self.assertEqual(self.start(), 0)

    def test_where_nothing_can_be_kept_it_runs_all_the_same_elsewhere(self) -> None:
        Path(self.directory).write_text("in the way")
        self.assertEqual(self.start(), 0)
        self.assertIn("is lost at a reboot", self.lines[0])
        self.assertTrue(os.path.isdir(self.kept_in[0]))

    def test_credentials_are_asked_for_until_the_network_is_there(self) -> None:
        served = Served({"config": CONFIG.format("http://region/").encode()}, failures=3)
        self.addCleanup(served.close)
        text = program._fetch(self.console, served.url + "config", VirtualClock())
        self.assertIn("token_key: tk", text)
        self.assertEqual(len(self.lines), 3)
        self.assertIn("attempt 1: HTTP Error 500: Internal Server Error; next try in 1 s", self.lines[0])

    def test_but_not_for_ever_and_not_when_they_are_refused(self) -> None:
        served = Served({})
        self.addCleanup(served.close)
        self.assertRaises(OSError, program._fetch, self.console, served.url + "config", VirtualClock())
        self.assertEqual((served.asked, self.lines), (1, []))
        clock = VirtualClock()
        self.assertRaises(OSError, program._fetch, self.console, "http://127.0.0.1:1/", clock)
        self.assertLess(clock.now(), 300)
        self.assertGreater(len(self.lines), 5)

    def test_what_is_no_answer_is_asked_for_again_and_no_proxy_sees_the_credentials(self) -> None:
        for broken in (b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\ncut", b""):
            with socket.socket() as server:
                server.bind(("127.0.0.1", 0))
                server.listen()
                right = CONFIG.format("http://region/").encode()

                def serve(server: socket.socket = server, broken: bytes = broken, right: bytes = right) -> None:
                    for answer in (broken, b"HTTP/1.0 200 OK\r\n\r\n" + right):
                        peer, _ = server.accept()
                        with peer:
                            peer.recv(65536)
                            peer.sendall(answer)

                threading.Thread(target=serve, daemon=True).start()
                self.patch(os, "environ", {**os.environ, "http_proxy": "http://127.0.0.1:1/", "no_proxy": ""})
                url = f"http://127.0.0.1:{server.getsockname()[1]}/config"
                self.assertIn("token_key: tk", program._fetch(self.console, url, VirtualClock()))
            self.assertIn("attempt 1: ", self.lines[-1])

    def test_an_answer_that_comes_by_the_byte_is_not_waited_for_for_ever(self) -> None:
        self.patch(program, "FETCH_SECONDS", 0.3)
        ended = threading.Event()
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen()

            def serve() -> None:
                peer, _ = server.accept()
                with peer, contextlib.suppress(OSError):
                    for _ in range(1000):
                        peer.sendall(b"HTTP/1.1 200 OK\r\nX: y"[:1])
                        threading.Event().wait(0.02)
                    ended.set()

            threading.Thread(target=serve, daemon=True).start()
            url = f"http://127.0.0.1:{server.getsockname()[1]}/config"
            self.assertRaises(OSError, program._fetch, self.console, url, seconds=0.0)
        self.assertFalse(ended.is_set())

    def test_numbers_that_make_no_sense_are_refused(self) -> None:
        for arguments in (["--heartbeat", "0"], ["--patience", "10"], ["--patience", "x"], ["--odd"]):
            self.patch(sys, "stderr", io.StringIO())
            error = self.assertRaises(SystemExit, program.main, arguments)
            self.assertEqual(error.code, 2)


class PriorityTests(SynchronousTestCase):
    def test_what_may_not_be_set_is_said_and_what_runs_is_let_be(self) -> None:
        def refuse(*arguments: Any) -> None:
            raise PermissionError(13, "Permission denied")

        self.patch(os, "setpriority", refuse)
        said: list[str] = []
        priority = Priority(said.append)
        self.patch(node.priority, "_write_oom", refuse)
        priority.protect()
        priority.release(os.getpid())
        self.assertEqual(
            said,
            ["the runner runs as any other process; it may not set: nice (Permission denied), "
             "oom_score_adj (Permission denied)"],
        )  # fmt: skip
