"""What an operator installs: the settings in ``etc`` are complete and the defaults, the units are what is promised."""

from __future__ import annotations

import configparser
import shlex
import tomllib
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from rack.config import RackConfig
from region.config import RegionConfig
from rpc.settings import keys, load

ETC = Path(__file__).parent.parent / "etc"
DAEMONS: dict[str, type[Any]] = {"region": RegionConfig, "rack": RackConfig}


def flat(table: dict[str, Any], above: str = "") -> set[str]:
    found: set[str] = set()
    for key, value in table.items():
        found |= flat(value, f"{above}{key}.") if isinstance(value, dict) else {above + key}
    return found


class TestSettings(SynchronousTestCase):
    def test_every_setting_is_in_the_file_and_nothing_else(self):
        for name, config in DAEMONS.items():
            with self.subTest(name):
                self.assertEqual(flat(tomllib.loads((ETC / f"{name}.toml").read_text())), set(keys(config)))

    def test_the_file_as_it_stands_is_the_defaults(self):
        for name, config in DAEMONS.items():
            with self.subTest(name):
                self.assertEqual(load(config, ETC / f"{name}.toml"), config())

    def test_every_setting_is_explained(self):
        for name in DAEMONS:
            before = ""
            for line in (ETC / f"{name}.toml").read_text().splitlines():
                if line and not line.startswith(("#", "[")):
                    with self.subTest(line):
                        # A comment stands right above, or above the setting that this one goes with.
                        self.assertTrue(before.startswith("#"), f"{name}.toml: nothing is said about {line}")
                before = line or before


class TestUnits(SynchronousTestCase):
    def unit(self, name: str) -> configparser.ConfigParser:
        unit = configparser.ConfigParser(interpolation=None, strict=True)
        unit.optionxform = str  # type: ignore[assignment,method-assign]  # so that names keep their case
        unit.read_string((ETC / "systemd" / f"stanchion-{name}.service").read_text())
        return unit

    def test_they_notify_and_are_confined(self):
        for name in DAEMONS:
            service = self.unit(name)["Service"]
            for key, value in {
                "Type": "notify",
                "NotifyAccess": "main",
                "StateDirectory": f"stanchion/{name}",
                "NoNewPrivileges": "yes",
                "ProtectSystem": "strict",
                "CapabilityBoundingSet": "",
                "KillMode": "mixed",
            }.items():
                with self.subTest(f"{name} {key}"):
                    self.assertEqual(service[key], value)

    def test_region_and_rack_are_different_users(self):
        self.assertNotEqual(self.unit("region")["Service"]["User"], self.unit("rack")["Service"]["User"])

    def test_they_start_the_daemon_with_its_settings_in_the_foreground(self):
        for name in DAEMONS:
            with self.subTest(name):
                program, *arguments = shlex.split(self.unit(name)["Service"]["ExecStart"])
                self.assertTrue(program.endswith("/bin/twistd"))
                self.assertEqual(
                    arguments,
                    ["-n", "--pidfile=", "--logger", "rpc.logs.observer", name, f"--config=/etc/stanchion/{name}.toml"],
                )

    def test_the_state_directory_is_the_one_of_the_settings(self):
        for name, config in DAEMONS.items():
            with self.subTest(name):
                directory = self.unit(name)["Service"]["StateDirectory"]
                self.assertEqual(Path("/var/lib") / directory, config().state_directory)


class TestNginx(SynchronousTestCase):
    def test_it_serves_blobs_from_where_the_region_keeps_them(self):
        text = (ETC / "nginx" / "stanchion.conf").read_text()
        self.assertIn(f"alias {RegionConfig().state_directory}/images/blobs/$sha256;", text)
        self.assertIn(f"server 127.0.0.1:{RegionConfig().http.port};", text)
