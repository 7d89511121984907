"""Notify: one datagram says what the daemon does, and a manager that is not there never stops the daemon."""

from __future__ import annotations

import os
import socket
import tempfile

from twisted.logger import LogLevel, capturedLogs
from twisted.trial.unittest import SynchronousTestCase

from rpc.notify import Notifier


class TestNotifier(SynchronousTestCase):
    def listen(self, address: str) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.addCleanup(listener.close)
        listener.bind("\0" + address[1:] if address.startswith("@") else address)
        listener.setblocking(False)
        return listener

    def test_readiness_reaches_a_socket_in_the_file_system(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        address = os.path.join(directory.name, "notify")
        listener = self.listen(address)
        self.assertTrue(Notifier(address).ready("serves on 5240"))
        self.assertEqual(listener.recv(4096), b"READY=1\nSTATUS=serves on 5240")

    def test_readiness_reaches_an_abstract_socket(self):
        address = f"@stanchion-test-{os.getpid()}"
        listener = self.listen(address)
        self.assertTrue(Notifier(address).ready())
        self.assertEqual(listener.recv(4096), b"READY=1")

    def test_a_status_cannot_forge_another_line(self):
        address = f"@stanchion-test-{os.getpid()}"
        listener = self.listen(address)
        self.assertTrue(Notifier(address).status("one\nREADY=1"))
        self.assertEqual(listener.recv(4096), b"STATUS=one READY=1")

    def test_stopping_is_said(self):
        address = f"@stanchion-test-{os.getpid()}"
        listener = self.listen(address)
        self.assertTrue(Notifier(address).stopping("asked to"))
        self.assertEqual(listener.recv(4096), b"STOPPING=1\nSTATUS=asked to")

    def test_without_a_manager_nothing_is_sent(self):
        self.assertFalse(Notifier.from_environment({}).ready())

    def test_the_variable_is_taken_so_that_no_child_inherits_it(self):
        environment = {"NOTIFY_SOCKET": "@x", "PATH": "/bin"}
        self.assertEqual(Notifier.from_environment(environment), Notifier("@x"))
        self.assertEqual(environment, {"PATH": "/bin"})

    def test_a_manager_that_is_gone_is_a_warning_and_no_error(self):
        with capturedLogs() as events:
            self.assertFalse(Notifier("/nonexistent/socket").ready())
        self.assertEqual(
            [(event["log_level"], event["address"]) for event in events], [(LogLevel.warn, "/nonexistent/socket")]
        )
