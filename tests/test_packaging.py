"""What an installation has: every package of ours, the migrations, and the twistd plugins."""

from __future__ import annotations

import configparser
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

ROOT = Path(__file__).resolve().parents[1]


class PackagingTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.config = configparser.ConfigParser()
        self.config.read(ROOT / "setup.cfg")

    def test_every_package_is_installed(self) -> None:
        source = ROOT / "src"
        found = {".".join(path.parent.relative_to(source).parts) for path in source.rglob("__init__.py")}
        listed = set(self.config["options"]["packages"].split())
        self.assertEqual(listed, found | {"twisted.plugins"})

    def test_every_file_that_is_not_python_is_installed_with_its_package(self) -> None:
        source = ROOT / "src"
        others = {
            path.relative_to(source)
            for path in source.rglob("*")
            if path.is_file() and path.suffix not in {".py", ".pyc"} and ".egg-info" not in str(path)
        }
        patterns = [
            f"{package}/{pattern}"
            for package, listed in self.config["options.package_data"].items()
            for pattern in listed.split()
        ]
        missed = [path for path in others if not any(path.match(pattern) for pattern in patterns)]
        self.assertEqual(missed, [])
        self.assertIn(Path("region/migrations/0001_images.sql"), others)

    def test_twisted_plugins_is_no_package_of_ours(self) -> None:
        # An __init__.py there would hide Twisted's own.
        self.assertFalse((ROOT / "twisted" / "plugins" / "__init__.py").exists())
        self.assertFalse((ROOT / "twisted" / "__init__.py").exists())
