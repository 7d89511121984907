"""Multipart bodies in the plainest form are cut at their delimiters, and mean what they mean to a parser of mail."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from region.api.forms import FileValue, Form, _mail, parse_body
from region.api.multipart import cut
from region.api.operations import BadRequest

PLAIN = "multipart/form-data; boundary=b0undary"
NAMES = st.text("abc. -_/", min_size=1, max_size=4).map(lambda name: f"n{name}n")
PIECES = st.lists(
    st.sampled_from((b"\r", b"\n", b"\r\n", b"--", b"b0undary", b"\0", b"\xff", b"\x85", b"\xc3\xa9", b" ", b"a")),
    max_size=8,
).map(b"".join)
DATA = PIECES.filter(lambda data: b"--b0undary" not in data)


def form_of(*parts: tuple[str, str, bytes]) -> bytes:
    """A body of parts, each a name, further header lines, and content."""
    return (
        b"".join(
            b'--b0undary\r\nContent-Disposition: form-data; name="' + name.encode() + b'"' + head.encode()
            + b"\r\n\r\n" + data + b"\r\n"
            for name, head, data in parts
        )
        + b"--b0undary--\r\n"
    )  # fmt: skip


def meaning(content_type: str, body: bytes) -> Form | str:
    try:
        return parse_body(content_type, body)
    except BadRequest as error:
        return type(error).__name__


class CutTests(SynchronousTestCase):
    @given(NAMES, DATA, st.booleans())
    @settings(max_examples=200)
    def test_every_byte_of_a_file_and_of_a_text_is_kept(self, name: str, data: bytes, is_file: bool) -> None:
        head = f'; filename="{name}"\r\nContent-Type: application/octet-stream' if is_file else ""
        body = form_of((name, head, data), ("op", "", b"signal"))
        self.assertIsNotNone(cut(PLAIN, body))
        form = parse_body(PLAIN, body)
        value = form[name][0]
        self.assertEqual(value.data if isinstance(value, FileValue) else value.encode(), data)
        self.assertEqual(form["op"], ("signal",))
        if is_file:
            self.assertIsInstance(value, FileValue)

    @given(NAMES, DATA, st.sampled_from(("", '; filename="x"', "\r\nContent-Type: text/plain; charset=utf-8",
                                         "\r\nContent-Type: application/octet-stream")))  # fmt: skip
    @settings(max_examples=200)
    def test_it_means_what_it_means_to_a_parser_of_mail(self, name: str, data: bytes, head: str) -> None:
        body = form_of((name, head, data))
        self.assertEqual(parse_body(PLAIN, body), _mail(PLAIN, body))

    @given(PIECES, PIECES)
    @settings(max_examples=200)
    @example(b"", b"--b0undary\n")
    @example(b"\r\n--b0undary \r\n", b"")
    @example(b"\n--b0undary--", b"")
    def test_what_looks_like_a_delimiter_is_left_to_the_parser_of_mail(self, before: bytes, after: bytes) -> None:
        body = form_of(("n", "", before + b"--b0undary" + after))
        self.assertIsNone(cut(PLAIN, body))

    def test_other_forms_are_left_to_the_parser_of_mail_and_understood(self) -> None:
        encoded = form_of(("n", "\r\nContent-Transfer-Encoding: base64", b"aGVsbG8="))
        reordered, folded, unquoted = (
            b"--b0undary\r\n" + head + b"\r\n\r\nhello\r\n--b0undary--"
            for head in (
                b'Content-Type: text/plain\r\nContent-Disposition: form-data; name="n"',
                b'Content-Disposition: form-data;\r\n name="n"',
                b"Content-Disposition: form-data; name=n",
            )
        )
        bare = form_of(("n", "", b"hello")).replace(b"\r\n", b"\n")
        preamble = b"nothing\r\n" + form_of(("n", "", b"hello"))
        for body in (encoded, reordered, folded, unquoted, bare, preamble):
            self.assertIsNone(cut(PLAIN, body), body)
            self.assertEqual(parse_body(PLAIN, body), {"n": ("hello",)}, body)

    def test_a_quoted_boundary_and_one_without_a_space_are_plain(self) -> None:
        for kind in ('multipart/form-data; boundary="b0undary"', "Multipart/Form-Data;boundary=b0undary"):
            found = cut(kind, form_of(("n", "", b"hello")))
            assert found is not None
            self.assertEqual([(part.name, part.data) for part in found], [("n", b"hello")])

    def test_a_body_that_was_cut_off_is_refused(self) -> None:
        whole = form_of(("n", "", b"hello"), ("m", '; filename="m"', b"there"))
        for length in range(1, len(whole) - 4):
            self.assertEqual(meaning(PLAIN, whole[:length]), "BadRequest", whole[:length])
