"""What nodes send: what is understood, and what is refused with which words."""

from __future__ import annotations

import base64
import bz2
import json
from typing import Any, Final

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from region.api.forms import FileValue, parse_body
from region.api.operations import ApiError, BadRequest, Invalid
from region.commissioning.signals import MessageFile, Signal, SignalStatus, Upload
from region.metadata.parsing import INFLATED_BYTES, MESSAGE_BYTES, parse_message, parse_signal


def signal(**fields: Any) -> Signal:
    """The signal of a form with these fields; bytes are files."""
    return parse_signal(
        {name: (FileValue(value) if isinstance(value, bytes) else value,) for name, value in fields.items()}
    )


class SignalTests(SynchronousTestCase):
    def refused(self, **fields: Any) -> dict[str, list[str]]:
        error = self.assertRaises(Invalid, signal, **fields)
        assert error.reply.status == 400
        found: dict[str, list[str]] = json.loads(error.reply.body)
        return found

    def test_the_fields_are_read(self) -> None:
        found = signal(
            status="WORKING", error="Finished 10-lshw", script_result_id="7", script_version_id="3", exit_status="-2",
            runtime="1.5", name="10-lshw", power_type="ipmi", power_parameters='{"power_address": "10.0.0.9"}',
        )  # fmt: skip
        self.assertEqual(
            found,
            Signal(
                SignalStatus.WORKING, "Finished 10-lshw", 7, 3, -2, 1.5, "10-lshw", "ipmi",
                {"power_address": "10.0.0.9"},
            ),
        )  # fmt: skip

    def test_an_exit_status_has_three_names_and_none_means_none(self) -> None:
        for name in ("exit_status", "script_result", "result"):
            self.assertEqual(signal(status="OK", **{name: "4"}).exit_status, 4)
        self.assertIsNone(signal(status="OK").exit_status)
        self.assertIsNone(signal(status="OK", exit_status="").exit_status)

    def test_files_go_to_their_scripts_by_name(self) -> None:
        found = signal(
            **{"status": "WORKING", "a": b"1\xff", "a.out": b"2", "a.err": b"3", "a.yaml": b"4", "b.out": b""}
        )
        self.assertEqual(
            found.uploads,
            (
                Upload("a", {"output": b"1\xff", "stdout": b"2", "stderr": b"3", "result": b"4"}),
                Upload("b", {"stdout": b""}),
            ),
        )

    def test_a_script_may_be_called_like_an_output(self) -> None:
        found = signal(**{"status": "WORKING", "x.out": b"1", "x.out.out": b"2"})
        self.assertEqual(found.uploads, (Upload("x.out", {"output": b"1", "stdout": b"2"}),))

    def test_a_file_named_result_is_the_output_of_a_script_of_that_name(self) -> None:
        self.assertEqual(signal(status="OK", result=b"x").uploads, (Upload("result", {"output": b"x"}),))

    def test_a_status_is_needed_and_is_one_of_those_there_are(self) -> None:
        self.assertEqual(self.refused(), {"status": ["This field is required."]})
        self.assertIn("should be one of: 'APPLYING_NETCONF', 'COMMISSIONING'", self.refused(status="DONE")["status"][0])

    def test_everything_that_is_wrong_is_said_at_once(self) -> None:
        found = self.refused(
            status="WORKING", script_result_id="x", script_version_id="0", exit_status="9" * 30, runtime="nan",
            power_parameters="[1]", **{"a/b": b""},
        )  # fmt: skip
        self.assertEqual(
            sorted(found),
            ["a/b", "exit_status", "power_parameters", "runtime", "script_result_id", "script_version_id"],
        )
        self.assertEqual(found["script_result_id"], ["'x' is not a whole number."])

    def test_a_field_that_is_given_twice_is_refused(self) -> None:
        error = self.assertRaises(Invalid, parse_signal, {"status": ("OK", "FAILED")})
        self.assertIn(b"given 2 times", error.reply.body)

    def test_nul_is_escaped_in_a_message_and_refused_elsewhere(self) -> None:
        self.assertEqual(signal(status="OK", error="a\x00b").message, "a\\x00b")
        self.assertEqual(list(self.refused(status="OK", name="a\x00")), ["name"])

    def test_a_long_message_is_cut_and_a_field_of_another_runner_is_ignored(self) -> None:
        self.assertEqual(len(signal(status="OK", error="x" * 9999, other="1").message), MESSAGE_BYTES)

    def test_equal_signals_have_equal_digests_and_any_difference_another(self) -> None:
        fields: dict[str, Any] = {"status": "WORKING", "exit_status": "0", "a": b"1", "a.out": b"2"}
        first = signal(**fields).digest
        self.assertEqual(first, signal(**dict(reversed(fields.items()))).digest)
        for name, value in {"exit_status": "1", "a": b"", "a.out": b"12", "a.err": b"", "error": "x"}.items():
            self.assertNotEqual(first, signal(**{**fields, name: value}).digest, name)
        self.assertNotEqual(
            signal(status="OK", a=b"12").digest, signal(status="OK", **{"a": b"1", "a.out": b"2"}).digest
        )

    @given(
        st.dictionaries(
            st.sampled_from(["status", "error", "exit_status", "runtime", "power_parameters", "name", "x", "x.out"])
            | st.text(max_size=8),
            st.binary(max_size=40).map(FileValue) | st.text(max_size=40) | st.sampled_from(["OK", "7", "1e9", "{}"]),
            max_size=6,
        )
    )
    def test_any_form_is_a_signal_or_refused(self, fields: dict[str, Any]) -> None:
        try:
            parse_signal({name: (value,) for name, value in fields.items()})
        except ApiError as error:
            self.assertEqual(error.reply.status, 400)

    def test_what_node_scripts_send_is_read_from_multipart(self) -> None:
        body = (
            b'--X\r\nContent-Disposition: form-data; name="op"\r\n\r\nsignal\r\n'
            b'--X\r\nContent-Disposition: form-data; name="status"\r\n\r\nWORKING\r\n'
            b'--X\r\nContent-Disposition: form-data; name="a.out"; filename="a.out"\r\n'
            b"Content-Type: application/octet-stream\r\n\r\n\x00\xff\r\n\r\n--X--\r\n"
        )
        form = dict(parse_body("multipart/form-data; boundary=X", body))
        self.assertEqual(form.pop("op"), ("signal",))
        self.assertEqual(parse_signal(form).uploads, (Upload("a", {"stdout": b"\x00\xff\r\n"}),))


DOCUMENT: Final = {
    "event_type": "finish", "origin": "cloudinit", "name": "modules-final/config-x", "description": "ran x",
    "timestamp": 1700000000.5, "result": "SUCCESS",
}  # fmt: skip


class MessageTests(SynchronousTestCase):
    def refused(self, **changes: Any) -> str:
        document = {name: value for name, value in {**DOCUMENT, **changes}.items() if value is not ...}
        return str(self.assertRaises(BadRequest, parse_message, json.dumps(document).encode()))

    def test_a_message_of_cloud_init_is_read(self) -> None:
        files = [
            {"path": "/var/log/x.log", "content": base64.b64encode(b"a\xff").decode(), "encoding": "base64"},
            {"path": "/gone", "content": None, "encoding": "base64"},
            {"path": "y", "content": base64.b64encode(bz2.compress(b"b" * 1000)).decode(), "encoding": "base64",
             "compression": "bzip2", "result": 3},
        ]  # fmt: skip
        found = parse_message(json.dumps({**DOCUMENT, "files": files}).encode())
        self.assertEqual(
            (found.name, found.result, found.timestamp), ("modules-final/config-x", "SUCCESS", 1700000000.5)
        )
        self.assertFalse(found.is_top_level)
        self.assertEqual(
            found.files,
            (MessageFile("/var/log/x.log", b"a\xff"), MessageFile("/gone", b""), MessageFile("y", b"b" * 1000, 3)),
        )

    def test_curtins_word_for_failure_is_known(self) -> None:
        found = parse_message(json.dumps({**DOCUMENT, "name": "cmd-install", "result": "FAILURE"}).encode())
        self.assertEqual((found.result, found.is_top_level), ("FAIL", True))

    def test_what_is_wrong_is_named(self) -> None:
        self.assertIn("lacks name", self.refused(name=...))
        self.assertIn("lacks origin, or it is not text", self.refused(origin=3))
        self.assertIn("'begin'", self.refused(event_type="begin"))
        for wrong in ("1", True, -1, 1e300):
            self.assertIn("timestamp", self.refused(timestamp=wrong))
        self.assertIn("not a list", self.refused(files={}))
        self.assertIn("File 0 of the status message has no path", self.refused(files=[{}]))
        self.assertIn("not base64", self.refused(files=[{"path": "a", "content": "a"}]))
        self.assertIn("'hex'", self.refused(files=[{"path": "a", "content": "", "encoding": "hex"}]))
        self.assertIn("bzip2", self.refused(files=[{"path": "a", "content": "", "compression": "gzip"}]))
        self.assertIn("exit status", self.refused(files=[{"path": "a", "content": "", "result": "0"}]))

    def test_files_that_inflate_without_end_are_refused(self) -> None:
        bomb = base64.b64encode(bz2.compress(b"\0" * (INFLATED_BYTES + 1))).decode()
        self.assertIn("more than", self.refused(files=[{"path": "a", "content": bomb, "compression": "bzip2"}]))
        half = base64.b64encode(bz2.compress(b"\0" * (INFLATED_BYTES // 2 + 1))).decode()
        entry = {"path": "a", "content": half, "compression": "bzip2"}
        self.assertIn("more than", self.refused(files=[entry, entry]))
        cut = base64.b64encode(bz2.compress(b"abc" * 1000)[:-8]).decode()
        self.assertIn("cut off", self.refused(files=[{"path": "a", "content": cut, "compression": "bzip2"}]))

    def test_what_no_database_takes_becomes_escapes(self) -> None:
        found = parse_message(json.dumps({**DOCUMENT, "description": "a\x00\ud800"}).encode())
        self.assertEqual(found.description, "a\\x00\\ud800")

    @given(
        st.binary(max_size=60)
        | st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                st.sampled_from([*DOCUMENT, "files", "path", "content", "encoding"]), inner, max_size=9),
            max_leaves=12,
        ).map(lambda value: json.dumps(value).encode())
    )  # fmt: skip
    def test_any_body_is_a_message_or_refused(self, body: bytes) -> None:
        try:
            parse_message(body)
        except ApiError as error:
            self.assertEqual(error.reply.status, 400)
