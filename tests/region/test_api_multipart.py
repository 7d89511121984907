"""Multipart bodies in the plainest form are cut at their delimiters, and mean what they mean to a parser of mail."""

from __future__ import annotations

from email.message import EmailMessage
from email.parser import BytesParser
from email.policy import HTTP

from hypothesis import example, given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from region.api.forms import FIELDS, FileValue, Form, parse_body
from region.api.multipart import MAX_HEAD, MAX_PARTS, Malformed, cut, split
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


def by_mail(body: bytes) -> list[tuple[str, bytes]]:
    """What a parser of mail says that the parts are: name and content."""
    message = BytesParser(EmailMessage, policy=HTTP).parsebytes(f"Content-Type: {PLAIN}\r\n\r\n".encode() + body)
    return [
        (str(part.get_param("name", header="content-disposition")), bytes(part.get_payload(decode=True)))
        for part in message.iter_parts()
    ]


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
        body = form_of((name, head, data), ("other", head, b""))
        for parts in (cut(PLAIN, body), split(PLAIN, body)):
            assert parts is not None
            self.assertEqual([(part.name, part.data) for part in parts], by_mail(body))
        self.assertEqual(cut(PLAIN, body), split(PLAIN, body))

    @given(PIECES, PIECES)
    @settings(max_examples=200)
    @example(b"", b"--b0undary\n")
    @example(b"\r\n--b0undary \r\n", b"")
    @example(b"\n--b0undary--", b"")
    def test_what_looks_like_a_delimiter_is_not_of_the_plainest_form(self, before: bytes, after: bytes) -> None:
        body = form_of(("n", "", before + b"--b0undary" + after))
        self.assertIsNone(cut(PLAIN, body))

    def test_other_forms_are_understood_too(self) -> None:
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


class HostileTests(SynchronousTestCase):
    """Bodies that would take a parser of mail minutes, gigabytes, or its stack."""

    def test_parts_in_parts_are_refused_however_deep(self) -> None:
        inside = b"".join(b"Content-Type: multipart/mixed; boundary=b%d\r\n\r\n--b%d\r\n" % (n, n) for n in range(1000))
        letters = b"Content-Type: message/rfc822\r\n\r\n" * 1000
        for content in (inside, letters):
            with self.assertRaisesRegex(BadRequest, "made of parts itself"):
                parse_body(PLAIN, b"--b0undary\r\n" + content + b"x\r\n--b0undary--\r\n")

    def test_headers_are_short(self) -> None:
        for head in (
            b"Content-Disposition: form-data; name=" + b"(" * MAX_HEAD,
            b"Content-Disposition: form-data" + b"; a=b" * 9999,
            b"X: y\r\n" * 9999 + b'Content-Disposition: form-data; name="n"', b"X: y" + b"\r\n z" * 9999, b"x" * 99999,
        ):  # fmt: skip
            with self.assertRaisesRegex(BadRequest, "bytes of them"):
                parse_body(PLAIN, b"--b0undary\r\n" + head + b"\r\n\r\nx\r\n--b0undary--\r\n")
        with self.assertRaisesRegex(BadRequest, "Content-Type is longer"):
            parse_body(PLAIN + "; a=b" * MAX_HEAD, form_of(("n", "", b"")))

    def test_there_are_few_parts(self) -> None:
        for head in ("", "\r\nX: y"):
            body = form_of(*((f"n{number}", head, b"") for number in range(FIELDS + 1)))
            with self.assertRaisesRegex(BadRequest, f"{MAX_PARTS}"):
                parse_body(PLAIN, body)

    def test_an_encoding_or_a_character_set_that_there_is_not_is_refused(self) -> None:
        for head in (
            b"Content-Transfer-Encoding: rot13\r\nContent-Disposition: form-data; name=n",
            b"Content-Disposition: form-data; name*=a\0b''n", b"Content-Disposition: form-data; name*=idna''%ff",
            b"Content-Type: multipart/mixed\r\nContent-Disposition: form-data; name=n", b"no header at all",
        ):  # fmt: skip
            body = b"--b0undary\r\n" + head + b"\r\n\r\nx\r\n--b0undary--"
            self.assertEqual(meaning(PLAIN, body), "BadRequest", head)

    def test_a_name_is_text_whatever_its_bytes_are(self) -> None:
        for name in (b'"n\xff"', b"\xff", b'"\xed\xa0\x80"'):
            form = parse_body(
                PLAIN, b"--b0undary\r\nContent-Disposition: form-data; name=%s\r\n\r\nx\r\n--b0undary--" % name
            )
            self.assertEqual(len([name.encode() for name in form]), 1)

    @given(
        st.text("ab;=*\"'()?%01\\\0 -_:,/éutf8", max_size=60),
        st.binary(max_size=9),
        st.sampled_from(("", "base64", "8bit")),
    )
    @settings(max_examples=200)
    def test_any_part_is_understood_or_refused(self, parameters: str, data: bytes, encoding: str) -> None:
        head = f"Content-Transfer-Encoding: {encoding}\r\nContent-Disposition: form-data; {parameters}"
        try:
            (part,) = split(PLAIN, b"--b0undary\r\n" + head.encode() + b"\r\n\r\n" + data + b"\r\n--b0undary--")
        except Malformed as error:
            self.assertNotEqual(str(error), "")
        else:
            part.name.encode()

    def test_half_a_character_in_json_is_no_text(self) -> None:
        for body in (b'{"\\ud800": "x"}', b'{"n": "\\udfff"}', b'{"n": ["x", "\\ud800x"]}'):
            with self.assertRaisesRegex(BadRequest, "half a character"):
                parse_body("application/json", body)
