"""The program ``stanchion``: what is not installed is not offered, and the exit status says how it went."""

from __future__ import annotations

import contextlib
import io
import sys
import types
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from rpc import cli
from rpc.console import CommandFailed, Status
from rpc.settings import SettingsError


class TestProgram(SynchronousTestCase):
    def setUp(self):
        self.outcome = None

        def run(arguments):
            if isinstance(self.outcome, BaseException):
                raise self.outcome
            sys.stdout.write(f"json={arguments.json}\n")
            return self.outcome

        module = types.ModuleType("part_for_this_test")
        module.commands = lambda subparsers: cli.command(subparsers, "do", run, "Do it.", epilog="examples: none")  # type: ignore[attr-defined]  # a module made here
        self.patch(sys, "modules", {**sys.modules, "part_for_this_test": module})
        self.build = cli.build_parser
        self.patch(cli, "build_parser", lambda: self.build(("part_for_this_test", "not_installed.cli")))

    def main(self, *argv: str) -> tuple[int, str, str]:
        output, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            try:
                status = cli.main(argv)
            except SystemExit as exit:
                self.assertIsInstance(exit.code, int)
                status = int(exit.code or 0)
        return status, output.getvalue(), errors.getvalue()

    def test_the_status_of_a_command_is_that_of_the_program(self):
        for self.outcome in (0, 1, 3):
            self.assertEqual(self.main("do")[0], self.outcome)

    def test_json_may_be_asked_for_before_or_after_the_command(self):
        self.outcome = 0
        self.assertEqual(self.main("do")[1], "json=False\n")
        self.assertEqual(self.main("do", "--json")[1], "json=True\n")
        self.assertEqual(self.main("--json", "do")[1], "json=True\n")

    def test_a_command_that_failed_says_why_in_one_line_on_standard_error(self):
        self.outcome = CommandFailed("it is not there", Status.NO)
        self.assertEqual(self.main("do"), (1, "", "stanchion: it is not there\n"))

    def test_bad_settings_are_a_matter_of_usage(self):
        self.outcome = SettingsError(Path("/etc/x.toml"), "is not TOML")
        self.assertEqual(self.main("do"), (2, "", "stanchion: /etc/x.toml: is not TOML\n"))

    def test_ctrl_c_is_no_traceback(self):
        self.outcome = KeyboardInterrupt()
        self.assertEqual(self.main("do"), (130, "", "stanchion: interrupted\n"))

    def test_an_unknown_command_is_a_matter_of_usage(self):
        status, _, errors = self.main("undo")
        self.assertEqual(status, Status.USAGE)
        self.assertIn("'undo'", errors)

    def test_no_command_shows_the_help(self):
        status, output, _ = self.main()
        self.assertEqual(status, Status.USAGE)
        self.assertIn("exit status:", output)

    def test_help_teaches_with_examples(self):
        status, output, _ = self.main("do", "--help")
        self.assertEqual(status, 0)
        self.assertIn("examples: none", output)

    def test_a_part_that_is_there_but_broken_is_an_error_and_not_a_part_that_is_missing(self):
        directory = Path(self.mktemp())
        directory.mkdir()
        (directory / "broken_part.py").write_text("import what_is_nowhere\n")
        self.patch(sys, "path", [str(directory), *sys.path])
        error = self.assertRaises(ModuleNotFoundError, self.build, ("broken_part",))
        self.assertEqual(error.name, "what_is_nowhere")

    def test_what_the_locale_cannot_show_is_shown_as_an_escape(self):
        written = io.BytesIO()
        with contextlib.redirect_stdout(io.TextIOWrapper(written, "ascii")) as stream:
            self.patch(cli, "DESCRIPTION", "a … b")
            self.assertRaises(SystemExit, cli.main, ["--help"])
            stream.flush()
        self.assertIn(b"a \\u2026 b", written.getvalue())
