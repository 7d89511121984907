"""What scripts may be told, and what they are told."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from region.scripts.parameters import ALL, Device, ParameterInvalid, check_definitions, expand, fill, unresolved
from tests.examples import examples

DISKS = [
    Device({"name": f"sd{letter}", "id_path": "", "model": "QEMU", "serial": f"S{letter}"}, tags)
    for letter, tags in (("a", ("ssd",)), ("b", ("rotary",)), ("c", ("ssd",)))
]
INTERFACE = Device({"name": "eth0", "mac_address": "52:54:00:00:00:01", "vendor": "", "product": ""})


def filled(definition: dict[str, Any], *value: object) -> Any:
    """The value of the one parameter that is so defined, given one or not."""
    definitions = check_definitions({"p": definition})
    return fill(definitions, {"p": value[0]} if value else {}).get("p", {}).get("value")


class DefinitionTests(SynchronousTestCase):
    def test_every_type_may_be_defined(self) -> None:
        definitions: dict[str, Any] = {
            "storage": {"type": "storage", "argument_format": "--disk={path}", "title": "Disk"},
            "nic": {"type": "interface", "argument_format": "{name} {mac}", "required": True},
            "runtime": {"type": "runtime", "min": 1, "max": 600, "default": 60},
            "url": {"type": "url", "default": "https://example.com/", "allow_list": True},
            "text": {"type": "string", "description": "Say it"},
            "secret": {"type": "password", "min": 8},
            "pick": {"type": "choice", "choices": ["a", "b"], "default": "b"},
            "flag": {"type": "boolean", "default": False},
        }
        self.assertEqual(check_definitions(definitions), definitions)

    def test_what_is_no_definition_is_refused_and_named(self) -> None:
        wrong: list[Any] = [
            None, "storage", {}, {"type": "disk"}, {"type": []}, {"type": "storage", "min": 1},
            {"type": "runtime", "default": "soon"}, {"type": "runtime", "min": -1}, {"type": "runtime", "max": True},
            {"type": "runtime", "min": 9, "max": 2}, {"type": "runtime", "min": 5, "default": 1},
            {"type": "url", "default": "file:///etc/shadow"}, {"type": "choice"}, {"type": "choice", "choices": []},
            {"type": "choice", "choices": ["a"], "default": "b"}, {"type": "storage", "argument_format": "{mac}"},
            {"type": "storage", "argument_format": "{path.__class__}"}, {"type": "storage", "argument_format": "x"},
            {"type": "storage", "argument_format": "{"}, {"type": "string", "required": "very"},
            {"type": "string", "default": ["a"]}, {"type": "storage", "default": " , "},
        ]  # fmt: skip
        for definition in wrong:
            with self.subTest(definition):
                error = self.assertRaises(ParameterInvalid, check_definitions, {"p": definition})
                self.assertIn("'p'", str(error))
        many: list[Any] = [None, [], {"a b": {"type": "string"}}, {1: {"type": "string"}}]
        for definitions in many:
            self.assertRaises(ParameterInvalid, check_definitions, definitions)


class FillTests(SynchronousTestCase):
    def test_what_is_given_goes_before_the_default(self) -> None:
        self.assertEqual(filled({"type": "runtime", "default": 60}), 60)
        self.assertEqual(filled({"type": "runtime", "default": 60}, "90"), 90)
        self.assertEqual(filled({"type": "boolean"}, "True"), True)
        self.assertEqual(filled({"type": "url", "allow_list": True}, "http://a/,https://b/"), "http://a/,https://b/")

    def test_what_nobody_says_is_left_out_unless_it_is_needed(self) -> None:
        self.assertIsNone(filled({"type": "string"}))
        self.assertRaises(ParameterInvalid, filled, {"type": "string", "required": True})

    def test_devices_are_all_unless_they_are_named(self) -> None:
        for kind in ("storage", "interface"):
            self.assertEqual(filled({"type": kind}), ALL)
            self.assertEqual(filled({"type": kind}, "sda"), "sda")

    def test_the_format_of_the_argument_goes_with_the_value(self) -> None:
        definitions = check_definitions({"t": {"type": "runtime", "argument_format": "--for {input}", "default": 5}})
        self.assertEqual(fill(definitions), {"t": {"type": "runtime", "value": 5, "argument_format": "--for {input}"}})

    def test_a_value_that_cannot_be_is_refused(self) -> None:
        for definition, value in (
            ({"type": "runtime"}, "1.5"), ({"type": "runtime"}, True), ({"type": "runtime"}, "9" * 12),
            ({"type": "runtime", "max": 9}, 10), ({"type": "boolean"}, "maybe"), ({"type": "url"}, "http://"),
            ({"type": "url"}, "http://[x"), ({"type": "url"}, "http://a/ b"),
            ({"type": "choice", "choices": ["a"]}, "b"),
            ({"type": "string", "min": 3}, "ab"), ({"type": "string"}, "x" * 9000), ({"type": "string"}, "a\x00"),
            ({"type": "string"}, None.__class__),
        ):  # fmt: skip
            with self.subTest(definition, value=value):
                self.assertRaises(ParameterInvalid, filled, definition, value)
        error = self.assertRaises(ParameterInvalid, fill, {}, {"x": 1})
        self.assertIn("'x'", str(error))


class ExpandTests(SynchronousTestCase):
    def named(self, value: str) -> list[str]:
        """The disks that ``value`` names."""
        values = fill(check_definitions({"storage": {"type": "storage"}}), {"storage": value})
        return [one["storage"]["value"]["name"] for one in expand(values, {"storage": DISKS})]

    def test_a_disk_is_named_in_any_of_its_ways(self) -> None:
        for text, wanted in (
            ("all", ["sda", "sdb", "sdc"]), ("sdb", ["sdb"]), ("/dev/sdc", ["sdc"]), ("Sa", ["sda"]),
            ("QEMU:Sb", ["sdb"]), ("ssd", ["sda", "sdc"]), ("rotary, sda", ["sda", "sdb"]), ("sdz", []),
        ):  # fmt: skip
            self.assertEqual(self.named(text), wanted, text)

    def test_an_interface_is_named_by_its_mac_address_too(self) -> None:
        for text in ("eth0", "52:54:00:00:00:01", "all"):
            values = fill(check_definitions({"nic": {"type": "interface"}}), {"nic": text})
            [one] = expand(values, {"interface": [INTERFACE]})
            self.assertEqual(one["nic"]["value"], INTERFACE.facts)

    def test_other_parameters_stay_and_nothing_is_left_to_look_for(self) -> None:
        definitions = check_definitions({"s": {"type": "storage"}, "t": {"type": "runtime", "default": 1}})
        for one in expand(fill(definitions), {"storage": DISKS}):
            self.assertEqual((one["t"]["value"], unresolved(one)), (1, ()))
            self.assertEqual(expand(one, {}), (one,))

    @examples(40)
    @given(st.integers(0, 3), st.integers(0, 2))
    def test_there_is_one_for_each_combination(self, disks: int, interfaces: int) -> None:
        definitions = check_definitions({"s": {"type": "storage"}, "i": {"type": "interface"}})
        found = expand(fill(definitions), {"storage": DISKS[:disks], "interface": [INTERFACE] * interfaces})
        self.assertEqual(len(found), disks * interfaces)
