"""How a daemon's log looks."""

from __future__ import annotations

from io import StringIO

from twisted.logger import Logger, LogPublisher
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from rpc.logs import observer


class LogTests(SynchronousTestCase):
    def written(self, write, namespace: str = "part", **environment: str) -> str:
        stream = StringIO()
        write(Logger(namespace, observer=LogPublisher(observer(stream, environment))))
        return stream.getvalue()

    def test_a_line_has_time_level_part_and_text(self) -> None:
        text = self.written(lambda log: log.warn("{what} is odd", what="it"))
        self.assertRegex(text, r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\S+ warn     part: it is odd\n$")

    def test_debug_is_left_out_unless_it_is_asked_for(self) -> None:
        self.assertEqual(self.written(lambda log: log.debug("x")), "")
        self.assertIn("part: x", self.written(lambda log: log.debug("x"), STANCHION_LOG_LEVEL="debug"))
        self.assertEqual(self.written(lambda log: log.info("x"), STANCHION_LOG_LEVEL="WARN"), "")

    def test_what_twisted_says_of_itself_is_left_out_unless_everything_is_asked_for(self) -> None:
        for namespace, text in (
            ("log_legacy", "RegionSite starting on 5240"),
            ("twisted.web.http.HTTPChannel", "Timing out client: x"),
            ("twisted.scripts._twistd_unix.UnixAppLogger", "reactor class: {reactor}."),
            ("twisted.internet.base", "Main loop terminated."),
        ):
            with self.subTest(namespace):
                shown = text.format(reactor="x")
                self.assertEqual(self.written(lambda log, text=text: log.info(text, reactor="x"), namespace), "")
                self.assertIn(shown, self.written(lambda log, text=text: log.warn(text, reactor="x"), namespace))
                everything = self.written(
                    lambda log, text=text: log.info(text, reactor="x"), namespace, STANCHION_LOG_LEVEL="debug"
                )
                self.assertIn(shown, everything)
        received = "Received SIGTERM, shutting down."
        self.assertIn(received, self.written(lambda log: log.info(received), "twisted.internet.base"))

    def test_a_failure_has_its_traceback(self) -> None:
        text = self.written(lambda log: log.failure("broken", Failure(RuntimeError("why"))))
        self.assertIn("broken", text)
        self.assertIn("RuntimeError: why", text)

    def test_what_a_peer_sent_looks_like_no_line_of_its_own_and_reaches_no_terminal(self) -> None:
        hostile = "1\n2026-11-30T00:00:00+0000 info     part: fake\x1b[2J\r\x9b\u2028\x00\ud800 é"
        text = self.written(lambda log: log.info("said {it}", it=hostile))
        first, second = text.splitlines()
        self.assertRegex(first, r"^\d{4}-\S+ info     part: said 1$")
        self.assertEqual(second, "  2026-11-30T00:00:00+0000 info     part: fake\\x1b[2J\\r\\x9b\\u2028\\x00\\ud800 é")
        journal = self.written(lambda log: log.info("said {it}", it=hostile), JOURNAL_STREAM="8:1")
        self.assertEqual([line[:3] for line in journal.splitlines()], ["<6>", "<6>"])
        text.encode()

    def test_under_systemd_every_line_has_its_priority(self) -> None:
        text = self.written(lambda log: log.failure("broken", Failure(RuntimeError("why"))), JOURNAL_STREAM="8:1")
        self.assertGreater(text.count("\n"), 1)
        self.assertTrue(all(each.startswith("<2>") for each in text.splitlines()))
        self.assertEqual(self.written(lambda log: log.info("x"), JOURNAL_STREAM="8:1"), "<6>part: x\n")

    def test_a_level_that_there_is_none_ends_the_start_and_says_which_there_are(self) -> None:
        error = self.assertRaises(SystemExit, observer, StringIO(), {"STANCHION_LOG_LEVEL": "loud"})
        self.assertIn("'loud', not one of debug, info", str(error))
