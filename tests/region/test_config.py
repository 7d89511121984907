"""A region's settings: what could not work later is refused at the start, by its key."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from region.config import RegionConfig
from rpc.settings import SettingsError, parse


class RegionConfigTests(SynchronousTestCase):
    """What is no proxy, no stream and no database."""

    def problem(self, text: str) -> str:
        return str(self.assertRaises(SettingsError, parse, RegionConfig, text, "region.toml"))

    def test_a_proxy_that_cannot_be_one_is_named_by_its_key(self) -> None:
        for value in ("proxy:3128", "https://proxy:3128", "http://", "http://[::1", "http://p:99999", "http://p/x"):
            self.assertIn("images.proxy must be a proxy's address", self.problem(f'[images]\nproxy = "{value}"'))

    def test_a_stream_that_cannot_be_one_is_named_by_its_key(self) -> None:
        for value in ("region", "ftp://region/", "http://", "http://[::1", "http://region:99999/"):
            self.assertIn("stream.url must be a URL", self.problem(f'[stream]\nurl = "{value}"'))

    def test_a_star_stands_for_the_address_that_the_rack_connected_to(self) -> None:
        config = parse(RegionConfig, '[stream]\nurl = "http://*:8080/MAAS/images-stream"')
        self.assertEqual(config.stream.url, "http://*:8080/MAAS/images-stream")

    def test_the_password_of_a_database_that_is_refused_is_not_shown(self) -> None:
        problem = self.problem('database = "postgres//someone:secret@db/stanchion"')
        self.assertIn("database must begin with 'postgresql://'", problem)
        self.assertNotIn("secret", problem)
