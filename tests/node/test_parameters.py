"""How what the region says of a script's parameters becomes the words that it is called with."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from node.parameters import BadParameter, arguments
from tests.examples import examples

DISK = {"name": "sda", "id_path": "/dev/disk/by-id/wwn-1", "model": "Fast Disk 9", "serial": "S1"}
CARD = {"name": "eth0", "mac_address": "00:11:22:33:44:55", "vendor": "Maker", "product": ""}


class ArgumentsTests(SynchronousTestCase):
    def words(self, exists: bool = True, **parameters: Any) -> list[str]:
        return arguments(parameters, lambda path: exists)

    def test_a_disk_is_its_path_that_stays_and_its_name_where_there_is_no_such_path(self) -> None:
        self.assertEqual(self.words(disk={"type": "storage", "value": DISK}), ["--storage=/dev/disk/by-id/wwn-1"])
        self.assertEqual(self.words(False, disk={"type": "storage", "value": DISK}), ["--storage=/dev/sda"])

    def test_a_disk_is_by_its_place_as_udev_names_it_but_never_what_is_no_device(self) -> None:
        for id_path, path in (
            ("pci-0000:00:1f.2-ata-1", "/dev/disk/by-path/pci-0000:00:1f.2-ata-1"),
            ("/sys/devices/pci0000:00/0000:00:02.0/virtio1", "/dev/sda"), ("../sdb", "/dev/sda"), ("", "/dev/sda"),
        ):  # fmt: skip
            value = {**DISK, "id_path": id_path}
            self.assertEqual(self.words(disk={"type": "storage", "value": value}), [f"--storage={path}"])

    def test_every_word_of_a_format_is_an_argument_and_a_value_is_never_cut(self) -> None:
        parameter = {"type": "storage", "value": DISK, "argument_format": "--model {model}  --at={input}"}
        self.assertEqual(self.words(disk=parameter), ["--model", "Fast Disk 9", "--at=/dev/disk/by-id/wwn-1"])

    def test_an_interface_is_its_name_or_what_else_the_format_asks_for(self) -> None:
        self.assertEqual(self.words(card={"type": "interface", "value": CARD}), ["--interface=eth0"])
        parameter = {"type": "interface", "value": CARD, "argument_format": "{mac}/{vendor}/{input}"}
        self.assertEqual(self.words(card=parameter), ["00:11:22:33:44:55/Maker/eth0"])

    def test_other_values_come_under_their_names_and_in_order(self) -> None:
        found = self.words(
            seconds={"type": "runtime", "value": 60}, size={"type": "string", "value": "a b"},
            really={"type": "boolean", "value": True},
            url={"type": "url", "value": "http://x", "argument_format": "-u"},
        )  # fmt: skip
        self.assertEqual(found, ["--runtime=60", "--size=a b", "--really=true", "-u"])

    def test_one_without_a_value_is_left_out_but_a_disk_must_be_there(self) -> None:
        self.assertEqual(self.words(name={"type": "string", "value": None}, other={"type": "string", "value": ""}), [])
        error = self.assertRaises(BadParameter, self.words, disk={"type": "storage", "value": None})
        self.assertEqual(str(error), "the parameter disk has no value: there is no such storage to run on")

    def test_a_format_that_asks_for_what_is_not_known_is_named(self) -> None:
        for layout in (
            "{colour}", "{", "{}", "{0}", "{input.real}", "{input.__class__}", "{input!x}", "{input!r}",
            "{input:>9999999999}", "{input[0]}",
        ):  # fmt: skip
            parameter = {"type": "string", "value": "x", "argument_format": layout}
            error = self.assertRaises(BadParameter, self.words, name=parameter)
            self.assertIn("the parameter name has the format", str(error))

    def test_what_no_program_can_be_given_is_refused(self) -> None:
        self.assertRaises(BadParameter, self.words, name={"type": "string", "value": "a\x00b"})
        self.assertRaises(BadParameter, self.words, name=["x"])

    @examples(60)
    @given(
        st.dictionaries(
            st.text(max_size=5),
            st.fixed_dictionaries(
                {"type": st.sampled_from(["storage", "interface", "string", "odd"]),
                 "value": st.none() | st.text(max_size=5) | st.integers() | st.dictionaries(st.text(), st.none()),
                 "argument_format": st.none() | st.text(alphabet="{}inputame :!0", max_size=9)}
            ),
            max_size=3,
        )
    )  # fmt: skip
    def test_whatever_there_is_are_words_or_a_reason(self, parameters: dict[str, Any]) -> None:
        try:
            found = arguments(parameters)
        except BadParameter as error:
            self.assertTrue(str(error))
        else:
            self.assertFalse([word for word in found if not isinstance(word, str) or "\x00" in word])
