"""Whatever a script printed, its hook gives a value that can be written, or says in a sentence why it cannot."""

from __future__ import annotations

import json
from typing import Any

from attrs import asdict
from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from region.hardware.documents import MAX_DOCUMENT
from region.hardware.hooks import HOOKS, HookError
from region.hardware.outputs import MAX_TEXT
from tests.examples import examples

names = st.sampled_from(sorted(HOOKS))

WORDS = [
    "<node", ' id="memory"', ' class="memory">', "<size units='bytes'>", "4096", "</size>", "</node>", "<lldp>", "<!--",
    "<interface name='e'>", "</interface>", "</lldp>", "<![CDATA[", "&amp;", "&x;", "<!DOCTYPE a>", '"', "[", "]", "{",
    "}", ":", ",", '"blockdevices"', '"name"', '"size"', '"ifname"', '"address"', '"sda"', '"addr_info"', "null",
    "true", "1e999", "NaN", "-1", "9" * 30, '"\\u0000"', '"\\ud800"', "CPU(s):", "On-line CPU(s) list:", "0-",
    "1: eth0", ": <UP>", "    link/ether ", "02:00:00:00:00:01", "    inet 10.0.0.1/", "99", " scope global",
    "\n", " ", "BOOTIF=",
    "01-02-00-00-00-00-01", "boot method: ", "uefi", "none", "pci:v", "\x00", "\x1b", "é", "\ufeff",
]  # fmt: skip
confused = st.lists(st.sampled_from(WORDS), max_size=30).map(lambda words: "".join(words).encode())

values: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-10, 1 << 70) | st.floats() | st.text(max_size=8)
    | st.sampled_from(["eth0", "sda", "02:00:00:00:00:01", "10.0.0.1", "global", "ether", "infiniband", "1", "disk"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from([
            "name", "size", "ro", "rm", "rota", "type", "model", "serial", "wwn", "log-sec", "id_path", "ifname",
            "flags", "address", "permaddr", "link_type", "linkinfo", "info_kind", "addr_info", "local", "prefixlen",
            "scope", "sysfs", "device", "carrier", "speed", "master", "mtu", "field", "data", "children",
        ]), inner, max_size=8,
    ),
    max_leaves=20,
)  # fmt: skip
documents = st.builds(
    lambda shape, entries: json.dumps({shape: entries} if shape else entries).encode(),
    st.sampled_from(["", "blockdevices", "lscpu"]),
    st.lists(values, max_size=4),
)


def is_storable(value: object) -> bool:
    """Whether PostgreSQL takes a value in a text or in jsonb, in a column of 8 bytes or fewer."""
    if isinstance(value, dict):
        return all(is_storable(key) and is_storable(one) for key, one in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_storable, value))
    if isinstance(value, str):
        return "\x00" not in value and value.encode("utf-8", "replace").decode() == value
    return value is None or isinstance(value, bool) or (isinstance(value, int) and 0 <= value < 1 << 63)


class AnyBytesTests(SynchronousTestCase):
    def check(self, name: str, data: bytes) -> None:
        try:
            parsed = HOOKS[name].parse({"stdout": data}, 0)
        except HookError as error:
            self.assertGreater(len(str(error)), 10)
            self.assertLess(len(str(error)), 500)
            return
        self.assertTrue(is_storable(asdict(parsed)), parsed)

    @examples(150)
    @given(names, st.binary(max_size=200))
    def test_any_bytes_end_in_a_value_or_in_a_sentence(self, name: str, data: bytes) -> None:
        self.check(name, data)

    @examples(200)
    @given(names, confused)
    def test_pieces_of_outputs_in_any_order_do_as_well(self, name: str, data: bytes) -> None:
        self.check(name, data)

    @examples(200)
    @given(st.sampled_from(["11-lscpu", "20-block-devices", "30-network-interfaces"]), documents)
    def test_any_json_does_as_well(self, name: str, data: bytes) -> None:
        self.check(name, data)

    @examples(60)
    @given(names, st.data())
    def test_outputs_that_were_cut_or_damaged_do_as_well(self, name: str, data: Any) -> None:
        whole = bytearray(EXAMPLES[name])
        for _ in range(data.draw(st.integers(0, 3))):
            whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
        self.check(name, bytes(whole[: data.draw(st.integers(0, len(whole)))]))


class OutputTests(SynchronousTestCase):
    def test_of_a_script_that_failed_nothing_is_made(self) -> None:
        for name, hook in HOOKS.items():
            self.assertIsNone(hook.parse({"stdout": EXAMPLES[name]}, 1))
            self.assertIsNotNone(hook.parse({"stdout": EXAMPLES[name]}, 0))

    def test_both_streams_in_one_are_read_where_only_they_came(self) -> None:
        for name, hook in HOOKS.items():
            self.assertEqual(
                hook.parse({"output": EXAMPLES[name]}, 0), hook.parse({"stdout": EXAMPLES[name], "output": b"x"}, 0)
            )

    def test_an_output_that_is_missing_or_empty_is_said_to_be(self) -> None:
        for hook in HOOKS.values():
            for outputs in ({}, {"stdout": b" \n"}, {"stderr": b"sh: lshw: not found"}):
                with self.assertRaisesRegex(HookError, "printed nothing"):
                    hook.parse(outputs, 0)

    def test_an_output_that_is_too_large_is_refused_before_it_is_read(self) -> None:
        for name, hook in HOOKS.items():
            limit = MAX_DOCUMENT if name in ("10-lshw", "40-lldp") else MAX_TEXT
            with self.assertRaisesRegex(HookError, f"printed {limit + 1} bytes, of which at most {limit} can be read"):
                hook.parse({"stdout": b"<" + b"x" * limit}, 0)

    def test_json_that_was_cut_is_said_to_be(self) -> None:
        for name in ("20-block-devices", "30-network-interfaces"):
            with self.assertRaisesRegex(HookError, "did not print JSON, or it was cut"):
                HOOKS[name].parse({"stdout": EXAMPLES[name][:-20]}, 0)

    def test_json_that_is_nested_without_end_is_refused(self) -> None:
        for name in ("11-lscpu", "20-block-devices", "30-network-interfaces"):
            for nested in (b'{"a":' * 200_000, b"[" * 1_000_000):
                with self.assertRaises(HookError):
                    HOOKS[name].parse({"stdout": nested}, 0)

    def test_the_example_outputs_are_read(self) -> None:
        self.assertEqual(HOOKS["12-virtuality"].parse({"stdout": b"kvm\n"}, 0).kind, "kvm")
        self.assertEqual(
            HOOKS["13-modaliases"].parse({"stdout": b"usb:b\npci:a\n\nusb:b\nnone\n"}, 0).names, ("pci:a", "usb:b")
        )

    def test_more_than_one_word_is_no_kind_of_virtual_machine(self) -> None:
        for said in (b"it is kvm", b"KVM", b"k\xffm", b"a" * 40, b"none\nkvm"):
            with self.assertRaisesRegex(HookError, "not the one word"):
                HOOKS["12-virtuality"].parse({"stdout": said}, 0)


class CommandLineTests(SynchronousTestCase):
    def parse(self, text: str) -> Any:
        return HOOKS["14-kernel-command-line"].parse({"stdout": text.encode()}, 0)

    def test_the_interface_and_the_method_of_booting_are_found(self) -> None:
        line = self.parse("BOOT_IMAGE=/vmlinuz root=squash:x BOOTIF=01-52-54-00-AB-cd-ef ro\nboot method: uefi\n")
        self.assertEqual((line.boot_mac, line.boot_method), ("52:54:00:ab:cd:ef", "uefi"))
        self.assertEqual(line.text, "BOOT_IMAGE=/vmlinuz root=squash:x BOOTIF=01-52-54-00-AB-cd-ef ro")

    def test_the_forms_that_loaders_write_are_all_understood(self) -> None:
        for form in ("BOOTIF=52-54-00-ab-cd-ef", "BOOTIF=52:54:00:ab:cd:ef", 'BOOTIF="01-52-54-00-ab-cd-ef"'):
            self.assertEqual(self.parse(f"quiet {form}").boot_mac, "52:54:00:ab:cd:ef", form)

    def test_what_is_no_such_thing_is_not_taken_for_one(self) -> None:
        for text in (
            "quiet",
            "XBOOTIF=01-52-54-00-ab-cd-ef",
            "BOOTIF=20-80-00-02-08-fe-80-00-00",
            "BOOTIF=",
            "BOOTIF=01",
        ):
            self.assertEqual(self.parse(text).boot_mac, "", text)
        self.assertEqual(self.parse("boot method: uefi").boot_method, "")
        self.assertEqual(self.parse("quiet\nboot method: a b").boot_method, "")


EXAMPLES = {
    "10-lshw": b'<list><node id="a" class="system"><node id="memory" class="memory"><size units="bytes">8589934592'
    b"</size></node></node></list>",
    "11-lscpu": b"Architecture: x86_64\nCPU(s): 8\nOn-line CPU(s) list: 0-7\nModel name: A CPU\n",
    "12-virtuality": b"none\n",
    "13-modaliases": b"pci:v00001AF4d00001041\nusb:v1D6Bp0002\n",
    "14-kernel-command-line": b"quiet BOOTIF=01-52-54-00-ab-cd-ef\nboot method: pxe\n",
    "20-block-devices": json.dumps(
        {"blockdevices": [{"name": "sda", "size": 10 << 30, "model": "M", "serial": "S", "rota": True, "wwn": "0x5"}]}
    ).encode(),
    "30-network-interfaces": json.dumps(
        [{"ifname": "eth0", "flags": ["UP", "LOWER_UP"], "link_type": "ether", "address": "02:00:00:00:00:01",
          "addr_info": [{"family": "inet", "local": "10.0.0.5", "prefixlen": 24, "scope": "global"}]}]
    ).encode(),
    "40-lldp": b'<lldp><interface name="eth0" via="LLDP"><chassis><name>s</name></chassis></interface></lldp>',
}  # fmt: skip
