"""What a script says about itself, from friends and from others."""

from __future__ import annotations

import json
from typing import Any

import yaml
from attrs import astuple, fields_dict
from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from region.nodes.statuses import HardwareType, Parallel, ResultType
from region.scripts.checks import CONTENT_LIMIT, checked_script, timeout
from region.scripts.metadata import LIMIT, embedded
from region.scripts.parameters import fill
from region.scripts.values import ScriptFields, ScriptInvalid
from tests.examples import examples

KINDS = ("storage", "interface", "runtime", "url", "string", "password", "choice", "boolean")


def script(*lines: str, before: str = "#!/bin/sh\n#\n", version: str = "1.0") -> bytes:
    """A script with these lines of metadata."""
    section = "".join(f"# {line}\n" for line in lines)
    return (
        f"{before}# --- Start MAAS {version} script metadata ---\n{section}"
        f"# --- End MAAS {version} script metadata ---\n\necho hello\n"
    ).encode()


class EmbeddedTests(SynchronousTestCase):
    def refusal(self, content: bytes) -> str:
        return str(self.assertRaises(ScriptInvalid, embedded, content))

    def test_a_script_without_metadata_says_nothing(self) -> None:
        for content in (b"", b"#!/bin/sh\necho script metadata\n", script()):
            self.assertEqual(embedded(content), {})

    def test_fields_are_read_as_yaml_from_the_comments(self) -> None:
        content = script(
            "name: disk-speed", "tags: [disk, slow]", "parameters:", "  storage: {type: storage}", "timeout: 00:10:00"
        )
        self.assertEqual(
            embedded(content),
            {
                "name": "disk-speed",
                "tags": ["disk", "slow"],
                "parameters": {"storage": {"type": "storage"}},
                "timeout": "00:10:00",
            },
        )

    def test_comments_may_be_indented_and_have_no_space(self) -> None:
        self.assertEqual(
            embedded(b"#!/bin/sh\n  #--- Start MAAS 1.0 script metadata --\n\n  #a:\n#  b: 1\n# --- End MAAS 1.0 script"
                     b" metadata ---\r\n"),
            {"a": {"b": 1}},
        )  # fmt: skip

    def test_what_is_wrong_is_said_with_its_line_in_the_script(self) -> None:
        for content, line, words in (
            (script("a: 1", "b: ]"), 5, "not YAML"),
            (script("a: 1", "a: 2"), 5, "'a' is there twice"),
            (script("a: {b: 1, b: 2}"), 4, "'b' is there twice"),
            (script("- a"), 4, "fields with values"),
            (script("1: a"), 4, "no name"),
            (script("a: &x 1", "b: *x"), 4, "anchors or aliases"),
            (script("a: *x"), 4, "anchors or aliases"),
            (script("a: !!python/object/apply:os.system [id]"), 4, "not YAML"),
            (script("a: 2001-99-99"), 4, "not YAML"),
            (script("a: " + "[" * 20), 4, "nested deeper"),
            (script("a: " + "[" * 50_000), 4, "nesting"),
            (script("a: " + "x" * LIMIT), 4, "more than"),
            (script("a: 1", version="9.9"), 1, "only 1.0"),
            (script("a: 1").replace(b"# a", b"a"), 4, "no comment"),
            (script("a: 1").replace(b"# --- End", b"# --- Ende"), 3, "no end"),
            (script("a: 1").replace(b"Start", b"End", 1), 3, "did not begin"),
            (script("a: 1").replace(b"a: 1", b"a: \xff"), 4, "not UTF-8"),
        ):
            with self.subTest(words, line=line):
                refusal = self.refusal(content)
                self.assertIn(words, refusal)
                self.assertIn(f"(line {line})", refusal)

    def test_aliases_that_would_grow_to_gigabytes_are_refused_at_once(self) -> None:
        levels = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40))]
        self.assertIn("anchors or aliases", self.refusal(script(*levels)))

    @examples(60)
    @given(
        st.dictionaries(
            st.text("abc_", min_size=1),
            st.recursive(
                st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text("ab: #'\"\n-"),
                lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=3),
                max_leaves=8,
            ),
            max_size=5,
        )
    )
    def test_whatever_yaml_writes_is_read_back(self, value: dict[str, object]) -> None:
        lines = yaml.safe_dump(value).splitlines() if value else []
        self.assertEqual(embedded(script(*lines)), value)

    @examples(100)
    @given(st.binary(max_size=200))
    def test_bytes_are_read_or_refused(self, noise: bytes) -> None:
        section = b"# --- Start MAAS 1.0 script metadata ---\n#" + noise.replace(b"\n", b"\n#")
        try:
            embedded(section + b"\n# --- End MAAS 1.0 script metadata ---\n")
        except ScriptInvalid as error:
            self.assertIn("line", str(error))


_LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates()
ANYTHING = st.recursive(
    _LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_LEAVES, inner, max_size=3), max_leaves=6
)
"""What YAML may turn out to be."""


class CheckTests(SynchronousTestCase):
    def wrong(self, content: bytes = b"#!/bin/sh\n", **given: Any) -> dict[str, str]:
        error = self.assertRaises(ScriptInvalid, checked_script, content, {"name": "a", **given})
        return {name: " ".join(found) for name, found in error.messages.items()}

    def test_a_name_is_all_that_a_script_needs(self) -> None:
        self.assertEqual(checked_script(b"#!/bin/sh\n", {"name": "a"}), ScriptFields("a"))
        error = self.assertRaises(ScriptInvalid, checked_script, b"#!/bin/sh\n", {})
        self.assertEqual(list(error.messages), ["name"])

    def test_metadata_and_request_say_the_same_in_their_own_words(self) -> None:
        wanted = ScriptFields(
            "disk-speed", "Speed", "Reads.", ("disk", "slow"), ResultType.COMMISSIONING, HardwareType.STORAGE,
            Parallel.INSTANCE, {"runtime": {"type": "runtime", "default": 60}},
            {"apt": ["fio"], "snap": [{"name": "x", "channel": "edge"}]}, {"speed": {"title": "MB/s"}},
            93784, True, True,
        )  # fmt: skip
        content = script(
            "name: disk-speed", "title: Speed", "description: Reads.", "tags: disk, slow", "script_type: commission",
            "hardware_type: ssd", "parallel: name", "parameters: {runtime: {type: runtime, default: 60}}",
            "packages: {apt: fio, snap: [{name: x, channel: edge}]}", "results: {speed: {title: MB/s}}",
            "timeout: 1 02:03:04", "destructive: yes", "may_reboot: true", "comment: first", "for_hardware: []",
        )  # fmt: skip
        self.assertEqual(checked_script(content, {}), wanted)
        given = {
            "name": "disk-speed", "title": "Speed", "description": "Reads.", "tags": "disk,slow", "type": "0",
            "hardware_type": "storage", "parallel": "1", "timeout": "93784", "destructive": True, "may_reboot": True,
            "parameters": json.dumps(wanted.parameters), "packages": json.dumps(wanted.packages),
            "results": json.dumps(wanted.results),
        }  # fmt: skip
        self.assertEqual(checked_script(b"#!/bin/sh\n", given), wanted)
        self.assertEqual(checked_script(content, given), wanted)

    def test_each_field_that_is_wrong_has_its_message(self) -> None:
        for name, value in (
            ("name", "a/b"), ("name", ".."), ("name", "12"), ("name", "none"), ("name", "x.yaml"), ("name", "a" * 256),
            ("title", "x" * 256), ("title", "a\x00"), ("title", ["a"]), ("description", "\ud800"), ("tags", "a b"),
            ("tags", 7), ("tags", [["a"]]), ("type", "release"), ("type", "1"), ("hardware_type", "gpu"),
            ("parallel", True), ("timeout", "soon"), ("timeout", -1), ("timeout", "999999999"), ("timeout", True),
            ("destructive", "perhaps"), ("parameters", "{"), ("parameters", {"a": {"type": "odd"}}),
            ("packages", {"pip": "x"}), ("packages", {"apt": "--allow-downgrades"}), ("packages", {"url": "file:///x"}),
            ("packages", {"snap": {"name": "x", "mode": "free"}}), ("packages", {"apt": [1]}), ("results", "3"),
            ("results", {"a": "\x00"}), ("results", {"a": float("nan")}), ("parameters", {"a": {1, 2}}),
            ("for_hardware", "pci:8086:1"), ("recommission", True), ("nonsense", 1),
        ):  # fmt: skip
            with self.subTest(name, value=value):
                self.assertEqual(list(self.wrong(b"#!/bin/sh\n", **{name: value})), [name])
        self.assertEqual(self.wrong(title=[], timeout="x").keys(), {"title", "timeout"})

    @examples(150)
    @given(
        st.sampled_from([*fields_dict(ScriptFields), "timeout", "type", "for_hardware"]),
        ANYTHING | st.fixed_dictionaries({"x": st.fixed_dictionaries({"type": st.sampled_from(KINDS)}, optional={
            "min": ANYTHING, "max": ANYTHING, "default": ANYTHING, "choices": ANYTHING, "argument_format": ANYTHING,
        })}),
    )  # fmt: skip
    def test_whatever_a_field_has_is_taken_or_refused_and_can_be_stored(self, name: str, value: object) -> None:
        try:
            fields = checked_script(b"#!/bin/sh\n", {"name": "a", name: value})
        except ScriptInvalid as error:
            self.assertLessEqual(error.messages.keys(), {name, "type", "name"})
            return
        for one in astuple(fields, recurse=False):
            stored = json.dumps(one, allow_nan=False, ensure_ascii=False)
            self.assertNotIn("\\u0000", stored)
            stored.encode()
        if fields.parameters:
            fill(fields.parameters)

    def test_a_content_that_no_node_could_run_is_refused(self) -> None:
        for content in (
            b"",
            b" \n",
            b"echo",
            b"#!sh\n",
            b"#!/bin/sh\r\necho\r\n",
            b"#!/bin/sh\n" + b"#" * CONTENT_LIMIT,
        ):
            with self.subTest(content[:20]):
                self.assertEqual(list(self.wrong(content)), ["script"])

    def test_a_request_does_not_contradict_the_script(self) -> None:
        content = script("title: One", "timeout: 60", "tags: a", "script_type: test")
        found = self.wrong(content, title="Two", type="commissioning")
        self.assertEqual(found.keys(), {"title", "type"})
        self.assertIn("title: 'One'", found["title"])
        fields = checked_script(content, {"name": "a", "title": "One", "timeout": "90", "tags": "b"})
        self.assertEqual((fields.timeout_seconds, fields.tags), (90, ("b",)))

    def test_a_change_leaves_what_it_does_not_mention_and_keeps_the_name(self) -> None:
        before = ScriptFields("a", "Title", tags=("x",), timeout_seconds=5)
        content = script("timeout: 60")
        self.assertEqual(
            checked_script(content, {"tags": "y"}, before), ScriptFields("a", "Title", tags=("y",), timeout_seconds=60)
        )
        self.assertEqual(checked_script(content, {"tags": "y"}, before, is_new=False).timeout_seconds, 5)
        error = self.assertRaises(ScriptInvalid, checked_script, content, {"name": "b"}, before)
        self.assertIn("keeps its name", str(error))

    @examples(60)
    @given(st.integers(0, 300), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
    def test_a_time_out_may_be_written_in_many_ways(self, days: int, hours: int, minutes: int, seconds: int) -> None:
        wanted = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
        clock = f"{hours}:{minutes:02}:{seconds:02}"
        for text in (str(wanted), f"{days} {clock}", f"{days} days, {clock}", f"{days * 24 + hours}:{clock[-5:]}"):
            self.assertEqual(timeout(text), wanted, text)
        self.assertEqual(timeout(wanted), wanted)
