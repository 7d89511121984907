"""Where the runner finds the region, in any of the forms in which it is told."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from node.credentials import Credentials, NoCredentials, find, parse

RIGHT = Credentials("http://10.0.0.1:5240/MAAS/metadata/", "ck", "tk", "ts")

BLOCK = """\
#cloud-config
# metadata_url: http://wrong/
datasource:
  MAAS:
    consumer_key: ck
    metadata_url: http://10.0.0.1:5240/MAAS/metadata/
    token_key: 'tk'
    token_secret: "ts"
"""
FLOW = (
    "datasource:\n  MAAS: {consumer_key: ck, metadata_url: 'http://10.0.0.1:5240/MAAS/metadata/',\n"
    "    token_key: tk, token_secret: ts}\n"
)
JSON = (
    '{"datasource": {"MAAS": {"consumer_key": "ck", "metadata_url": "http://10.0.0.1:5240/MAAS/metadata/", '
    '"token_key": "tk", "token_secret": "ts"}}}'
)


def nothing(path: str) -> str:
    raise FileNotFoundError(2, "No such file", path)


class ParseTests(SynchronousTestCase):
    def test_every_style_of_yaml_says_the_same(self) -> None:
        for text in (BLOCK, FLOW, JSON):
            self.assertEqual(parse(text), RIGHT)

    def test_what_is_missing_is_named(self) -> None:
        error = self.assertRaises(NoCredentials, parse, BLOCK.replace("token_key:", "token:"))
        self.assertEqual(str(error), "lacks token_key")

    def test_a_url_that_is_none_is_shown(self) -> None:
        for url in ("http://region:99999/", "http://region:x/", "http://[::1/", "http://:80/"):
            error = self.assertRaises(NoCredentials, parse, JSON.replace(RIGHT.metadata_url, url))
            self.assertIn("which is no http(s) URL", str(error))
        error = self.assertRaises(NoCredentials, parse, JSON.replace("http://", "ftp://"))
        self.assertIn("'ftp://10.0.0.1", str(error))

    def test_secrets_are_not_shown(self) -> None:
        self.assertNotIn("ts", repr(RIGHT))

    @given(st.text())
    def test_any_text_has_credentials_or_lacks_them(self, text: str) -> None:
        self.assertRaises(NoCredentials, parse, text)


class FindTests(SynchronousTestCase):
    def test_the_command_line_alone_counts_where_it_names_something(self) -> None:
        read = {"a": BLOCK}.__getitem__
        self.assertEqual(find(read, nothing, "a", {"COMMISSIONING_CREDENTIALS_URL": "http://b"}), RIGHT)

        def missing(path: str) -> str:
            raise OSError(2, "No such file")

        error = self.assertRaises(NoCredentials, find, missing, nothing, "b", {}, "/nowhere/*")
        self.assertIn("b: [Errno 2] No such file", str(error))

    def test_the_environment_comes_before_cloud_init_and_that_before_the_kernel(self) -> None:
        directory = Path(self.mktemp())
        directory.mkdir()
        configured = directory / "90_cmdline.cfg"
        configured.write_text(BLOCK)
        other = BLOCK.replace("10.0.0.1", "10.0.0.2")
        pattern = str(directory / "*cmdline*.cfg")

        def read(path: str) -> str:
            return (
                "root=x cloud-config-url=http://region/c quiet" if path == "/proc/cmdline" else Path(path).read_text()
            )

        def fetch(url: str) -> str:
            return {"http://env": other, "http://region/c": BLOCK.replace("10.0.0.1", "10.0.0.3")}[url]

        environment = {"COMMISSIONING_CREDENTIALS_URL": "http://env"}
        self.assertIn("10.0.0.2", find(read, fetch, None, environment, pattern).metadata_url)
        self.assertEqual(find(read, fetch, None, {}, pattern), RIGHT)
        configured.write_text("nothing of it")
        self.assertIn("10.0.0.3", find(read, fetch, None, {}, pattern).metadata_url)

    def test_when_there_are_none_it_is_said_where_they_were_looked_for(self) -> None:
        error = self.assertRaises(NoCredentials, find, lambda path: "quiet", nothing, None, {}, "/nowhere/*.cfg")
        for word in ("COMMISSIONING_CREDENTIALS_URL", "/nowhere/*.cfg", "cloud-config-url=", "--config"):
            self.assertIn(word, str(error))
