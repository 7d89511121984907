"""Which of what ``ip addr`` prints are a node's network interfaces, and what is known of each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from region.hardware.interfaces import MAX_ENTRIES, MAX_INTERFACES, Interface, Interfaces, read_interfaces
from region.hardware.ip_text import read_ip_text
from region.hardware.outputs import HookError
from tests.examples import examples

INFINIBAND = "80:00:02:08:fe:80:00:00:00:00:00:00:e4:1d:2d:03:00:1b:2c:41"

TEXT = """1: lo: <LOOPBACK,UP,LOWER_UP> mtu 65536 qdisc noqueue state UNKNOWN group default qlen 1000
    link/loopback 00:00:00:00:00:00 brd 00:00:00:00:00:00
    inet 127.0.0.1/8 scope host lo
       valid_lft forever preferred_lft forever
2: enp3s0f0: <BROADCAST,MULTICAST,UP,LOWER_UP> mtu 9000 qdisc mq state UP group default qlen 1000
    link/ether 3c:fd:fe:aa:00:01 brd ff:ff:ff:ff:ff:ff
    altname enp3s0f0np0
    inet 192.0.2.2/24 brd 192.0.2.255 scope global dynamic enp3s0f0
       valid_lft 3000sec preferred_lft 3000sec
    inet 169.254.3.4/16 scope link enp3s0f0
    inet6 2001:db8::2/64 scope global nodad
       valid_lft forever preferred_lft forever
    inet6 fe80::fc:ff:fe00:1/64 scope link
       valid_lft forever preferred_lft forever
3: enp3s0f1: <NO-CARRIER,BROADCAST,MULTICAST,UP> mtu 1500 qdisc mq state DOWN group default qlen 1000
    link/ether 3c:fd:fe:aa:00:02 brd ff:ff:ff:ff:ff:ff
4: eno1: <BROADCAST,MULTICAST> mtu 1500 qdisc noop state DOWN group default qlen 1000
    link/ether 3c:fd:fe:aa:00:03 brd ff:ff:ff:ff:ff:ff
5: ib0: <BROADCAST,MULTICAST,UP,LOWER_UP> mtu 2044 qdisc mq state UP group default qlen 256
    link/infiniband 80:00:02:08:fe:80:00:00:00:00:00:00:e4:1d:2d:03:00:1b:2c:41 brd 00:ff:ff:ff:ff:12:40:1b:ff:ff:00:00
6: bond0: <BROADCAST,MULTICAST,MASTER,UP,LOWER_UP> mtu 1500 qdisc noqueue state UP group default qlen 1000
    link/ether 3c:fd:fe:aa:00:04 brd ff:ff:ff:ff:ff:ff
    inet 10.5.0.7/16 scope global bond0
7: ens1: <BROADCAST,MULTICAST,SLAVE,UP,LOWER_UP> mtu 1500 qdisc mq master bond0 state UP group default qlen 1000
    link/ether 3c:fd:fe:aa:00:04 brd ff:ff:ff:ff:ff:ff
8: ens2: <BROADCAST,MULTICAST,SLAVE,UP,LOWER_UP> mtu 1500 qdisc mq master bond0 state UP group default qlen 1000
    link/ether 3c:fd:fe:aa:00:04 brd ff:ff:ff:ff:ff:ff permaddr 3c:fd:fe:aa:00:05
9: bond0.100@bond0: <BROADCAST,MULTICAST,UP,LOWER_UP> mtu 1500 qdisc noqueue state UP group default qlen 1000
    link/ether 3c:fd:fe:aa:00:04 brd ff:ff:ff:ff:ff:ff
    inet 10.6.0.7/16 scope global bond0.100
10: docker0: <NO-CARRIER,BROADCAST,MULTICAST,UP> mtu 1500 qdisc noqueue state DOWN group default
    link/ether 02:42:8e:00:00:01 brd ff:ff:ff:ff:ff:ff
11: vethab@if2: <BROADCAST,MULTICAST,UP,LOWER_UP> mtu 1500 qdisc noqueue master docker0 state UP group default
    link/ether 5e:54:03:55:9c:d9 brd ff:ff:ff:ff:ff:ff link-netnsid 0
12: sit0@NONE: <NOARP> mtu 1480 qdisc noop state DOWN group default qlen 1000
    link/sit 0.0.0.0 brd 0.0.0.0
13: tun0: <POINTOPOINT,MULTICAST,NOARP,UP,LOWER_UP> mtu 1500 qdisc fq_codel state UNKNOWN group default qlen 500
    link/none
    inet 10.8.0.6 peer 10.8.0.5/32 scope global tun0
"""


def entry(name: str = "eth0", mac: str = "02:00:00:00:00:01", **more: Any) -> dict[str, Any]:
    return {"ifname": name, "flags": ["UP", "LOWER_UP"], "link_type": "ether", "address": mac, "addr_info": [], **more}


def read(*entries: object) -> Interfaces:
    return read_interfaces({"stdout": json.dumps(entries).encode()})


def names(found: Interfaces) -> list[str]:
    return [one.name for one in found.found]


class TextTests(SynchronousTestCase):
    """The text of ``ip addr``."""

    def setUp(self) -> None:
        read = read_interfaces({"stdout": TEXT.encode()})
        self.assertEqual(read.problems, ())
        self.found = {one.name: one for one in read.found}

    def test_only_hardware_is_an_interface(self) -> None:
        self.assertEqual(list(self.found), ["enp3s0f0", "enp3s0f1", "eno1", "ib0", "ens1", "ens2"])

    def test_addresses_that_others_reach_it_by_are_known(self) -> None:
        self.assertEqual(self.found["enp3s0f0"].addresses, (("192.0.2.2", 24), ("2001:db8::2", 64)))
        self.assertEqual(self.found["enp3s0f1"].addresses, ())

    def test_the_addresses_of_a_bond_are_those_of_its_first_member(self) -> None:
        self.assertEqual(self.found["ens1"].addresses, (("10.5.0.7", 16),))
        self.assertEqual(self.found["ens2"].addresses, ())

    def test_the_own_address_of_a_member_of_a_bond_is_used(self) -> None:
        self.assertEqual([self.found[name].mac[-2:] for name in ("ens1", "ens2")], ["04", "05"])

    def test_whether_there_is_a_carrier_is_known_only_of_one_that_is_up(self) -> None:
        connected = {name: one.connected for name, one in self.found.items()}
        self.assertEqual(
            connected, {"enp3s0f0": True, "enp3s0f1": False, "eno1": None, "ib0": True, "ens1": True, "ens2": True}
        )

    def test_infiniband_has_no_mac_but_a_guid(self) -> None:
        port = self.found["ib0"]
        self.assertEqual((port.mac, port.key), ("", "e4:1d:2d:03:00:1b:2c:41"))
        self.assertEqual(port.facts["hardware_address"], INFINIBAND)

    def test_details_tell_hardware_from_software_whatever_it_is_called(self) -> None:
        text = "".join(
            f"{n}: x{n}: <UP> mtu 1500\n    link/ether 02:00:00:00:00:0{n} brd ff:ff:ff:ff:ff:ff promiscuity 0\n{line}"
            for n, line in enumerate(
                ["    bridge forward_delay 1500\n", "    altname enp0s3\n", "    bond_slave state ACTIVE\n",
                 "    vf 0     link/ether 0e:00:00:00:00:01 brd ff:ff:ff:ff:ff:ff\n", "    dummy numtxqueues 1\n"]
            )
        )  # fmt: skip
        self.assertEqual(names(read_interfaces({"stdout": text.encode()})), ["x1", "x2", "x3"])

    def test_lines_that_are_cut_or_garbled_spoil_only_what_they_are_of(self) -> None:
        for line in (
            "    inet",
            "    inet 10.0.0.1/",
            "    inet x/y scope",
            "    link/",
            "9: ",
            "x",
            "    inet 1.1.1.1/999 scope global",
        ):
            found = read_interfaces({"stdout": TEXT.replace("    altname enp3s0f0np0", line).encode()})
            self.assertEqual({one.name: one for one in found.found}, self.found, line)

    def test_no_more_interfaces_are_read_than_asked_for(self) -> None:
        self.assertEqual([one["ifname"] for one in read_ip_text(TEXT, 2)], ["lo", "enp3s0f0"])


class JsonTests(SynchronousTestCase):
    """The JSON of ``ip -json -details addr``, with what the script adds."""

    def test_ten_interfaces_are_ten(self) -> None:
        found = read(*(entry(f"eth{n}", f"02:00:00:00:00:{n:02x}", mtu=9000) for n in range(10)))
        self.assertEqual(names(found), [f"eth{n}" for n in range(10)])
        self.assertEqual(found.found[3], Interface("eth3", "02:00:00:00:00:03", connected=True, facts={"mtu": 9000}))

    def test_what_is_made_by_software_is_no_interface(self) -> None:
        self.assertEqual(
            names(
                read(
                    entry("real", linkinfo={}),
                    entry("port", "02:00:00:00:00:02", linkinfo={"info_kind": "dsa"}),
                    *(
                        entry(f"x{n}", f"02:00:00:00:01:{n:02x}", linkinfo={"info_kind": kind})
                        for n, kind in enumerate(
                            ("bond", "bridge", "vlan", "veth", "dummy", "macvlan", "new_in_linux_9")
                        )
                    ),
                    entry("eth0.5", "02:00:00:00:02:01", link="eth0"),
                    entry("pair", "02:00:00:00:02:02", link_index=7),
                    entry("lo", "00:00:00:00:00:00", link_type="loopback"),
                    entry("wg0", "", link_type="none"),
                )
            ),
            ["real", "port"],
        )

    def test_what_the_script_saw_in_sys_counts_more_than_names(self) -> None:
        found = read(
            entry("bond0", sysfs={"device": True}), entry("eth1", "02:00:00:00:00:02", sysfs={"device": False})
        )
        self.assertEqual(names(found), ["bond0"])

    def test_what_the_script_adds_is_used(self) -> None:
        sysfs = {
            "device": True, "carrier": "0", "speed": "-1", "permanent_address": "02:00:00:00:00:AA", "driver": "ixgbe",
            "vendor": "0x8086", "bus": None,
        }  # fmt: skip
        found = read(entry(sysfs=sysfs, permaddr="02:00:00:00:00:bb")).found[0]
        self.assertEqual((found.mac, found.connected), ("02:00:00:00:00:aa", False))
        self.assertEqual(found.facts, {"driver": "ixgbe", "vendor": "0x8086"})

    def test_the_addresses_of_a_bridge_are_those_of_its_first_member_that_is_hardware(self) -> None:
        address = {"family": "inet", "local": "10.0.0.5", "prefixlen": 24, "scope": "global"}
        found = read(
            entry("br0", "02:00:00:00:00:09", linkinfo={"info_kind": "bridge"}, addr_info=[address]),
            entry("tap0", "02:00:00:00:00:08", linkinfo={"info_kind": "tun"}, master="br0"),
            entry("eth0", master="br0"),
            entry("eth1", "02:00:00:00:00:02", master="br0"),
        )
        self.assertEqual([one.addresses for one in found.found], [(("10.0.0.5", 24),), ()])

    def test_infiniband_is_known_by_its_guid_whatever_its_queue_pair_is(self) -> None:
        first, again = (
            read(entry("ib0", prefix + INFINIBAND[11:], link_type="infiniband", linkinfo={"info_kind": "ipoib"}))
            for prefix in ("80:00:02:08", "80:00:00:48")
        )
        self.assertEqual(first.found[0].key, again.found[0].key)

    def test_what_is_wrong_with_one_interface_is_said_and_leaves_the_others(self) -> None:
        wrong: Sequence[tuple[object, str]] = (
            (5, "number 2 is left out: it is 5, not an object"),
            ({"address": "x"}, "number 2 is left out: its name is None"),
            (entry("a b"), "a b is left out: its name is 'a b'"),
            (entry("x" * 99), "is left out: its name is 'xxx"),
            (entry("eth1", "02:00:00"), "eth1 is left out: its MAC address is '02:00:00'"),
            (entry("eth1", "ff:ff:ff:ff:ff:ff"), "which no interface has for its own"),
            (entry("eth1", "00:00:00:00:00:00"), "which no interface has for its own"),
            ({**entry("eth1"), "address": [1, 2]}, "its MAC address is a list of 2"),
            (entry("eth1"), "eth1 is left out: eth0 has the same MAC address, 02:00:00:00:00:01"),
            (entry("eth0", "02:00:00:00:00:07"), "eth0 is left out: another interface has the same name"),
            (entry("ib0", "02:00", link_type="infiniband"), "its InfiniBand address is '02:00', not 20 bytes"),
        )
        for what, why in wrong:
            found = read(entry(), what, entry("eth9", "02:00:00:00:00:09"))
            self.assertEqual(names(found), ["eth0", "eth9"], why)
            self.assertEqual(len(found.problems), 1)
            self.assertIn(why, found.problems[0])

    def test_what_is_no_address_is_passed_over(self) -> None:
        good = {"family": "inet6", "local": "2001:db8::5", "prefixlen": 64, "scope": "global"}
        bad: list[object] = [
            None, 5, "10.0.0.1", {}, {**good, "local": None}, {**good, "local": "any"}, {**good, "prefixlen": 129},
            {**good, "prefixlen": "x"}, {**good, "local": "10.0.0.1", "prefixlen": 33}, {**good, "local": "::1"},
            {**good, "local": "fe80::1"}, {**good, "local": "169.254.0.1", "prefixlen": 16}, {**good, "scope": "link"},
            {**good, "local": "ff02::1"}, {**good, "local": "0.0.0.0", "prefixlen": 0}, {**good, "scope": ["global"]},
        ]  # fmt: skip
        self.assertEqual(read(entry(addr_info=[*bad, good])).found[0].addresses, (("2001:db8::5", 64),))
        self.assertEqual(read(entry(addr_info="none")).found[0].addresses, ())

    def test_problems_that_are_many_are_counted(self) -> None:
        problems = read(entry(), *([5] * 100)).problems
        self.assertEqual((len(problems), problems[-1]), (21, "and 80 more that are left out"))

    def test_outputs_without_any_interface_are_refused(self) -> None:
        for text in ("[]", "[{}, {}]", "[null]", '{"ifname": "eth0"}', "command not found", "[1"):
            with self.assertRaises(HookError):
                read_interfaces({"stdout": text.encode()})

    def test_empty_objects_are_passed_over(self) -> None:
        self.assertEqual((names(read({}, entry(), {})), read({}, entry()).problems), (["eth0"], ()))

    def test_an_output_with_interfaces_without_end_is_refused(self) -> None:
        with self.assertRaisesRegex(HookError, f"more than {MAX_ENTRIES} network interfaces"):
            read(*([1] * (MAX_ENTRIES + 1)))
        many = read(*(entry(f"e{n}", f"02:00:00:00:{n >> 8:02x}:{n & 255:02x}") for n in range(MAX_INTERFACES + 1)))
        self.assertEqual(len(many.found), MAX_INTERFACES)
        self.assertIn(f"there are {MAX_INTERFACES} already", many.problems[0])

    @examples(60)
    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans()), min_size=1, max_size=8))
    def test_every_name_and_mac_is_there_once(self, listed: list[tuple[int, int, bool]]) -> None:
        found = read(*(entry(f"eth{n}", f"02:00:00:00:00:0{mac}", sysfs={"device": real}) for n, mac, real in listed))
        self.assertEqual(len(set(names(found))), len(found.found))
        self.assertEqual(len({one.key for one in found.found}), len(found.found))
        hardware = sum(real for _, _, real in listed)
        self.assertEqual(len(found.found) + len(found.problems), hardware)
