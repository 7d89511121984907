"""The runner runs on whatever a machine boots: Python 3.6, and nothing but its standard library."""

from __future__ import annotations

import ast
import glob
import os
import subprocess
import sys
from pathlib import Path

from twisted.trial.unittest import SkipTest, SynchronousTestCase

import node
from region.metadata.userdata import runner_archive

DIRECTORY = Path(node.__file__).parent
OLDER = ("3.6", "3.7", "3.8", "3.9")
LATER = frozenset({"dataclasses", "contextvars", "importlib.resources", "importlib.metadata", "zoneinfo", "graphlib",
                   "tomllib", "distutils", "imp", "asyncore", "cgi", "crypt", "telnetlib", "pipes"})  # fmt: skip
"""Modules that some Python from 3.6 on does not have."""


def trees() -> list[tuple[str, ast.Module]]:
    """Every module of the runner, and every script of it that is Python, as the syntax of Python 3.6."""
    found = []
    for path in sorted(DIRECTORY.rglob("*")):
        if path.suffix == ".py" or (path.parent.name == "builtin" and b"python3" in path.read_bytes()[:60]):
            found.append((path.name, ast.parse(path.read_text(), path.name, feature_version=(3, 6))))
    return found


class SyntaxTests(SynchronousTestCase):
    def test_it_is_python_3_6(self) -> None:
        self.assertGreater(len(trees()), 15)

    def test_it_imports_the_standard_library_and_itself_alone(self) -> None:
        for name, tree in trees():
            for part in ast.walk(tree):
                if isinstance(part, ast.Import):
                    modules = [alias.name for alias in part.names]
                elif isinstance(part, ast.ImportFrom):
                    self.assertEqual(part.level, 0, name)
                    modules = [part.module or ""]
                else:
                    continue
                for module in modules:
                    self.assertIn(module.partition(".")[0], sys.stdlib_module_names | {"node"}, f"{name}: {module}")
                    self.assertNotIn(module, LATER, name)
                    self.assertNotEqual((module, "annotations"), ("__future__", getattr(part, "names", [part])[0]))

    def test_nothing_of_the_language_is_used_that_came_later_and_parses_all_the_same(self) -> None:
        for name, tree in trees():
            for part in ast.walk(tree):
                if isinstance(part, ast.Attribute):
                    self.assertNotIn(part.attr, ("removeprefix", "removesuffix", "waitstatus_to_exitcode"), name)
                if isinstance(part, ast.Call):
                    given = {keyword.arg for keyword in part.keywords}
                    self.assertFalse(given & {"capture_output", "text", "missing_ok", "dirs_exist_ok"}, name)
                if isinstance(part, ast.ImportFrom) and part.module in ("typing", "__future__"):
                    later = {"Protocol", "Final", "Literal", "TypedDict", "Self", "annotations", "runtime_checkable"}
                    self.assertFalse(later & {alias.name for alias in part.names}, name)


class OlderPythonTests(SynchronousTestCase):
    def test_the_archive_starts_on_the_older_pythons_that_are_here(self) -> None:
        pythons = [
            path
            for version in OLDER
            for path in (*glob.glob(f"{os.path.expanduser('~')}/.pyenv/versions/{version}.*/bin/python3"),
                         f"/usr/bin/python{version}", f"/usr/local/bin/python{version}")
            if os.access(path, os.X_OK)
        ]  # fmt: skip
        if not pythons:
            raise SkipTest("no Python older than 3.10 is here")
        archive = Path(self.mktemp())
        archive.write_bytes(runner_archive())
        # Where the tests run in several processes, these are told where their own Python has its modules.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        for python in pythons:
            run = subprocess.run(
                [python, archive, "--config", "/nowhere"], capture_output=True, text=True, timeout=60, env=environment
            )
            self.assertEqual(run.returncode, 2, f"{python}: {run.stderr}")
            self.assertIn("no credentials for the region were found (/nowhere: ", run.stderr)
