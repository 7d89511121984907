"""Scripts that turn against the runner: against what it has, where it keeps that, and itself. The others run all the
same, and of each the region or the log says how it ended."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from node.executing import Executor
from node.running import Ended, Outputs
from tests.node.hostile import CREDENTIALS_PARTS, HostileRegion
from tests.node.runs import INDEX, LABELS, Run, Scripts, make_run
from tests.node.virtual import VirtualClock


class HostileScriptTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = self.mktemp()

    def run_with(
        self, does: Mapping[str, Callable[[Outputs], int]], look: Callable[[list[str]], object] = lambda command: None
    ) -> Run:
        region = HostileRegion(VirtualClock(), INDEX)
        url = region.start()
        self.addCleanup(region.close)
        scripts = Scripts(region.clock, does)
        execute = scripts.execute

        def looked(command: list[str], *arguments: Any) -> Ended:
            if command[0] != "apt-get":
                look(command)
            return execute(command, *arguments)

        self.patch(Scripts, "execute", lambda _, *arguments: looked(*arguments))
        run = make_run(region, url, self.directory, scripts)
        self.status = run.runner.run()
        return run

    def check_whole(self, run: Run) -> None:
        """All ran, and of each the region or the log says how it ended."""
        self.assertEqual(sorted(run.scripts.ran), sorted(LABELS), run.text)
        for number, label in enumerate(LABELS, 1):
            self.assertTrue(
                number in run.region.results or f"the result of {label} is NOT delivered" in run.text, label
            )
        self.assertEqual(len(run.region.finals), 1)
        for secret in CREDENTIALS_PARTS:
            self.assertNotIn(secret[:5], run.text)

    def test_one_deletes_all_that_the_runner_keeps(self) -> None:
        def delete(outputs: Outputs) -> int:
            shutil.rmtree(self.directory, ignore_errors=True)  # what is being sent goes by itself meanwhile
            return 0

        paths: list[bool] = []
        run = self.run_with({"10-first.1": delete}, lambda command: paths.append(os.access(command[0], os.X_OK)))
        self.check_whole(run)
        # What is still to be run is there again.
        self.assertEqual(paths, [True] * len(LABELS))
        [(status, why)] = run.region.finals
        self.assertEqual(self.status, 0 if status == "OK" else 1, why)

    def test_one_puts_directories_pipes_and_links_where_its_outputs_and_its_result_should_be(self) -> None:
        def directory(outputs: Outputs) -> int:
            os.unlink(outputs.combined)
            os.mkdir(outputs.combined)
            os.mkdir(f"{outputs.combined}.yaml")
            return 0

        def pipe(outputs: Outputs) -> int:
            for path in outputs:
                if os.path.exists(path):
                    os.unlink(path)
                os.mkfifo(path)
            os.mkfifo(f"{outputs.combined}.yaml")
            return 0

        def link(outputs: Outputs) -> int:
            os.symlink("/dev/zero", f"{outputs.combined}.yaml")
            return 0

        run = self.run_with({"10-first.1": directory, "20-packages.2": pipe, "30-third.3": link})
        self.check_whole(run)
        self.assertEqual(sorted(run.region.results), [1, 2, 3, 4, 5, 6])
        [body] = run.region.results[2]
        self.assertIn(b"20-packages.2.out cannot be read: it is no file", body)

    def test_what_an_earlier_start_left_in_place_of_its_outputs_is_removed(self) -> None:
        for ending in ("", ".yaml"):
            Path(self.directory, "out", "10-first.1", f"10-first.1{ending}", "x").mkdir(parents=True)
        run = self.run_with({})
        self.check_whole(run)
        self.assertEqual((self.status, run.region.finals), (0, {("OK", "6 scripts passed")}))

    def test_what_cannot_even_be_told_fails_the_run(self) -> None:
        def fail(*arguments: object, **more: object) -> None:
            raise MemoryError

        self.patch(Executor, "finished", fail)
        run = self.run_with({})
        self.assertEqual(self.status, 1)
        [(status, why)] = run.region.finals
        self.assertEqual(status, "FAILED")
        self.assertIn("nothing could be told of: 10-first.1, 20-packages.2, 30-third.3", why)

    def test_what_it_echoes_is_its_own_but_in_no_line_of_the_runner(self) -> None:
        def echo(outputs: Outputs) -> int:
            Path(f"{outputs.combined}.yaml").write_text(f"status: {'x' * 35}{CREDENTIALS_PARTS[2]}\n")
            Path(outputs.combined).write_text(" ".join(CREDENTIALS_PARTS))
            return 0

        run = self.run_with({"10-first.1": echo})
        self.check_whole(run)
        self.assertIn("10-first.1: its result cannot be used: its status has ", run.text)
