"""Tests for :mod:`region.upstream.paths`."""

from __future__ import annotations

from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

from hypothesis import example, given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from region.upstream.paths import MAX_LENGTH, UnsafePath, file_url

ROOT = "http://images.example/ephemeral-v3/stable/"

TRAVERSALS = {
    "absolute": "/etc/passwd",
    "parent": "../x",
    "parent inside": "a/../../x",
    "parent at the end": "a/..",
    "current": "./x",
    "dots": "a/.../x",
    "parent with spaces": "a/.. /x",
    "empty part": "a//x",
    "directory": "a/",
    "network path": "//evil.example/x",
    "scheme": "http://evil.example/x",
    "scheme of a file": "file:/etc/passwd",
    "scheme only": "data:text/plain,x",
    "drive": "C:/x",
    "backslash": "a\\..\\x",
    "escaped parent": "%2e%2e/x",
    "escaped parent inside": "a/%2E%2e/x",
    "half escaped parent": "a/.%2e/x",
    "escaped slash": "a/..%2fx",
    "escaped slash without a parent": "a%2Fx",
    "escaped backslash": "a%5c..%5cx",
    "twice escaped parent": "%252e%252e/x",
    "thrice escaped slash": "a%25252fb",
    "NUL": "a/x\0.jpg",
    "escaped NUL": "a/x%00",
    "newline": "a/x\nHost: evil",
    "escaped newline": "a/x%0d%0a",
    "escaped scheme": "http%3a//evil.example/x",
    "half character": "a/\ud800",
    "too long": "a" * (MAX_LENGTH + 1),
    "empty": "",
}


class FileURLTests(SynchronousTestCase):
    """Paths of a stream become URLs below the root, or nothing."""

    def test_a_path_that_could_leave_the_root_is_refused(self) -> None:
        for name, path in TRAVERSALS.items():
            with self.assertRaises(UnsafePath, msg=name) as caught:
                file_url(ROOT, path)
            self.assertTrue(str(caught.exception).isprintable(), name)

    def test_what_is_not_text_is_refused(self) -> None:
        for value in (None, 7, True, ["a"], {"a": 1}):
            self.assertRaises(UnsafePath, file_url, ROOT, value)

    def test_the_message_says_what_is_wrong_with_which_path(self) -> None:
        error = self.assertRaises(UnsafePath, file_url, ROOT, "a/../../etc/passwd")
        self.assertIn("'a/../../etc/passwd'", str(error))

    def test_a_real_path_is_appended_as_it_is(self) -> None:
        for path in (
            "streams/v1/com.ubuntu.maas:stable:v3:download.sjson",
            "noble/amd64/20260201/ga-24.04/generic/boot-kernel",
            "bootloaders/uefi/amd64/20260201.0/grub2-signed.tar.xz",
            "a/b+c~d@e=f,g;h&i!j$k(l)m*n'o",
        ):
            self.assertEqual(file_url(ROOT, path), ROOT + path)

    def test_percent_escapes_are_kept_and_other_characters_are_escaped(self) -> None:
        self.assertEqual(file_url(ROOT, "a%20b/c d"), ROOT + "a%20b/c%20d")
        self.assertEqual(file_url(ROOT, "a?b#c"), ROOT + "a%3Fb%23c")
        self.assertEqual(file_url(ROOT, "100%/50%zz"), ROOT + "100%25/50%25zz")
        self.assertEqual(file_url(ROOT, "käse"), ROOT + "k%C3%A4se")

    @settings(deadline=None)
    @given(st.one_of(st.text(), st.text(alphabet="./\\%2eE5cfF:a0")))
    @example("%2E%2E")
    def test_whatever_is_accepted_stays_below_the_root_however_often_it_is_decoded(self, path: str) -> None:
        try:
            url = file_url(ROOT, path)
        except UnsafePath:
            return
        self.assertTrue(url.startswith(ROOT))
        self.assertTrue(url.isascii() and url.isprintable() and " " not in url)
        parts = urlsplit(url)
        self.assertEqual((parts.netloc, parts.query, parts.fragment), ("images.example", "", ""))
        reading = parts.path
        for _ in range(5):
            self.assertNotIn("\\", reading)
            self.assertNotIn("..", PurePosixPath(reading).parts)
            reading = unquote(reading)
