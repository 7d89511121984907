"""What the hooks make of a node's rows, on a real database."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

from twisted.internet.defer import DeferredList, ensureDeferred

from region.database import Transaction
from region.hardware.hooks import HOOKS
from region.nodes.findings import Finding
from region.nodes.kinds import HARDWARE_CHANGED, HARDWARE_NOT_USED, MAC_ADDRESS_TAKEN
from region.nodes.values import NodeName
from rpc.events import MAX_DESCRIPTION
from tests.database import DatabaseTestCase
from tests.examples import SOAK

GB = 10**9


def mac(number: int) -> str:
    return f"02:00:00:00:00:{number:02x}"


def interface(name: str, number: int, *addresses: str, **more: Any) -> dict[str, Any]:
    listed = [{"local": one, "prefixlen": 24, "scope": "global"} for one in addresses]
    return {"ifname": name, "flags": ["UP", "LOWER_UP"], "address": mac(number), "addr_info": listed, **more}


def disk(name: str, serial: str = "", **more: Any) -> dict[str, Any]:
    return {"name": name, "size": 500 * GB, "serial": serial, "model": "M" if serial else "", **more}


class HardwareTestCase(DatabaseTestCase):
    async def make_node(self, name: str = "alpha") -> NodeName:
        system_id = (name + "aaaaaa")[:6]
        rows = await self.database.query(
            "INSERT INTO node (system_id, hostname, architecture) VALUES (%s, %s, 'amd64/generic') RETURNING id",
            (system_id, name),
        )
        return NodeName(rows[0][0], system_id, name)

    async def apply(self, node: NodeName, script: str, output: object, exit_status: int = 0) -> Sequence[Finding]:
        data = output if isinstance(output, bytes) else json.dumps(output).encode()
        parsed = HOOKS[script].parse({"stdout": data}, exit_status)

        async def write(transaction: Transaction) -> Sequence[Finding]:
            return await HOOKS[script].apply(transaction, node, parsed)

        return await self.database.transact(write)

    async def interfaces(self, node: NodeName, *found: object) -> Sequence[Finding]:
        return await self.apply(node, "30-network-interfaces", list(found))

    async def disks(self, node: NodeName, *found: object) -> Sequence[Finding]:
        return await self.apply(node, "20-block-devices", {"blockdevices": list(found)})

    async def value(self, sql: str, *parameters: object) -> Any:
        row = await self.database.one(sql, parameters)
        return None if row is None else row[0]

    async def interface_ids(self, node: NodeName) -> dict[str, int]:
        return dict(
            await self.database.query("SELECT name, id FROM interface WHERE node_id = %s ORDER BY id", (node.id,))
        )

    async def disk_ids(self, node: NodeName) -> dict[str, int]:
        return dict(
            await self.database.query("SELECT name, id FROM block_device WHERE node_id = %s ORDER BY id", (node.id,))
        )

    async def facts(self, node: NodeName) -> dict[str, Any]:
        return dict(await self.value("SELECT facts FROM node WHERE id = %s", node.id))


class InterfaceTests(HardwareTestCase):
    async def boot(self, node: NodeName) -> Any:
        return await self.value(
            "SELECT name FROM interface JOIN node ON boot_interface_id = interface.id WHERE node.id = %s", node.id
        )

    async def test_what_was_found_is_written(self) -> None:
        node = await self.make_node()
        sysfs = {"device": True, "driver": "e1000", "carrier": "0"}
        self.assertEqual(
            await self.interfaces(
                node, interface("eth0", 1, "10.0.0.5", "2001:db8::5"), interface("eth1", 2, sysfs=sysfs)
            ),
            [],
        )
        rows = await self.database.query(
            """SELECT name, type, mac_address, enabled, link_connected, discovered, links, facts
               FROM interface ORDER BY id"""
        )
        addresses = [{"address": "10.0.0.5", "prefix": 24}, {"address": "2001:db8::5", "prefix": 24}]
        self.assertEqual(
            rows,
            [
                ("eth0", "physical", mac(1), True, True, addresses, [], {}),
                ("eth1", "physical", mac(2), True, False, [], [], {"driver": "e1000"}),
            ],
        )

    async def test_interfaces_keep_their_rows_when_names_are_swapped(self) -> None:
        node = await self.make_node()
        await self.interfaces(node, interface("eth0", 1), interface("eth1", 2), interface("eth2", 3))
        before = await self.interface_ids(node)
        await self.database.execute(
            'UPDATE interface SET links = \'[{"mode": "dhcp"}]\', enabled = false WHERE id = %s', (before["eth0"],)
        )
        await self.database.execute("UPDATE node SET boot_interface_id = %s", (before["eth0"],))
        findings = await self.interfaces(node, interface("eth1", 1), interface("eth2", 2), interface("eth0", 3))
        self.assertEqual(findings, [])
        after = await self.interface_ids(node)
        self.assertEqual(after, {"eth1": before["eth0"], "eth2": before["eth1"], "eth0": before["eth2"]})
        self.assertEqual(await self.boot(node), "eth1")
        row = await self.database.one("SELECT links, enabled FROM interface WHERE name = 'eth1'")
        self.assertEqual(row, ([{"mode": "dhcp"}], False), "what people configured was lost")

    async def test_what_is_not_seen_of_a_carrier_stays_as_it_was(self) -> None:
        node = await self.make_node()
        await self.interfaces(node, interface("eth0", 1, flags=["UP", "NO-CARRIER"]), interface("eth1", 2, flags=[]))
        await self.interfaces(node, interface("eth0", 1, flags=[]), interface("eth1", 2, flags=[]))
        rows = await self.database.query("SELECT link_connected FROM interface ORDER BY id")
        self.assertEqual(rows, [(False,), (True,)])

    async def test_an_interface_that_is_gone_is_removed_and_that_is_said(self) -> None:
        node = await self.make_node()
        await self.interfaces(node, interface("eth0", 1), interface("eth1", 2))
        await self.database.execute(
            "UPDATE node SET boot_interface_id = %s", ((await self.interface_ids(node))["eth1"],)
        )
        findings = await self.interfaces(node, interface("eth0", 1))
        self.assertEqual([finding.kind for finding in findings], [HARDWARE_CHANGED])
        self.assertIn(f"eth1 ({mac(2)}) was not found any more", findings[0].description)
        self.assertIn("no boot interface", findings[0].description)
        self.assertEqual(list(await self.interface_ids(node)), ["eth0"])
        self.assertIsNone(await self.boot(node))

    async def test_if_none_is_found_those_that_are_known_stay(self) -> None:
        node = await self.make_node()
        await self.interfaces(node, interface("eth0", 1))
        findings = await self.interfaces(node, interface("lo", 0, link_type="loopback"), 5)
        self.assertEqual([finding.kind for finding in findings], [HARDWARE_NOT_USED] * 2)
        self.assertEqual(list(await self.interface_ids(node)), ["eth0"])

    async def test_a_mac_that_another_node_has_stays_there(self) -> None:
        first, second = await self.make_node("alpha"), await self.make_node("beta")
        await self.interfaces(first, interface("eth0", 1), interface("eth1", 2))
        findings = await self.interfaces(second, interface("eth0", 7), interface("eth1", 2), interface("eth2", 8))
        self.assertEqual([finding.kind for finding in findings], [MAC_ADDRESS_TAKEN])
        self.assertIn(f"eth1 has the MAC address {mac(2)}, which node alpha (alphaa) has", findings[0].description)
        self.assertEqual(list(await self.interface_ids(first)), ["eth0", "eth1"])
        self.assertEqual(list(await self.interface_ids(second)), ["eth0", "eth2"])
        # Once it is gone there, it comes here.
        await self.interfaces(first, interface("eth0", 1))
        await self.interfaces(second, interface("eth0", 7), interface("eth1", 2), interface("eth2", 8))
        self.assertEqual(list(await self.interface_ids(second)), ["eth0", "eth2", "eth1"])

    async def test_two_nodes_that_find_one_mac_at_the_same_time_do_not_both_get_it(self) -> None:
        nodes = [await self.make_node("alpha"), await self.make_node("beta")]
        shared = [
            [interface("a", 1), interface("b", 2), interface("c", 3)],
            [interface("c", 3), interface("a", 1), interface("d", 4)],
        ]
        done = await DeferredList(
            [ensureDeferred(self.interfaces(node, *found)) for node, found in zip(nodes, shared, strict=True)]
        )
        self.assertEqual([success for success, _ in done], [True, True], done)
        findings = [finding for _, found in done for finding in found]
        self.assertEqual([finding.kind for finding in findings], [MAC_ADDRESS_TAKEN] * 2)
        self.assertEqual(await self.value("SELECT count(*) FROM interface"), 4)

    async def test_bonds_bridges_and_vlans_are_left_alone(self) -> None:
        node = await self.make_node()
        await self.database.execute(
            """INSERT INTO interface (node_id, name, type, mac_address) VALUES
               (%(node)s, 'bond0', 'bond', %(mac)s), (%(node)s, 'eth1', 'vlan', %(mac)s)""",
            {"node": node.id, "mac": mac(1)},
        )
        findings = await self.interfaces(node, interface("eth0", 1), interface("eth1", 2))
        self.assertEqual(sorted(await self.interface_ids(node)), ["bond0", "eth0", "eth1", "eth1-020000000002"])
        self.assertIn("eth1 is kept as eth1-020000000002", findings[0].description)
        self.assertEqual(len(await self.interfaces(node, interface("eth0", 1), interface("eth1", 2))), 1)

    async def test_infiniband_keeps_its_row_by_its_guid(self) -> None:
        node, other = await self.make_node(), await self.make_node("beta")
        for prefix in ("80:00:02:08", "80:00:00:48"):
            address = prefix + ":fe:80:00:00:00:00:00:00:e4:1d:2d:03:00:1b:2c:41"
            port = interface("ib0", 0, link_type="infiniband")
            self.assertEqual(await self.interfaces(node, interface("eth0", 1), {**port, "address": address}), [])
        self.assertEqual(await self.interfaces(other, {**port, "address": address}), [])
        rows = await self.database.query(
            "SELECT id, mac_address, facts->>'hardware_address' FROM interface ORDER BY id"
        )
        self.assertEqual([row[1:] for row in rows], [(mac(1), None), (None, address), (None, address)])

    async def test_ten_interfaces_are_written_at_once_and_again(self) -> None:
        node = await self.make_node()
        for _ in range(2):
            await self.interfaces(node, *(interface(f"eth{n}", n + 1) for n in range(10)))
        self.assertEqual(list(await self.interface_ids(node)), [f"eth{n}" for n in range(10)])

    async def test_what_a_node_booted_from_is_its_boot_interface_whichever_script_comes_first(self) -> None:
        line = f"quiet BOOTIF=01-{mac(2).replace(':', '-')}\nboot method: uefi\n".encode()
        for first_line in (True, False):
            node = await self.make_node(f"node{first_line:d}")
            found = [interface("eth0", 1 + 16 * first_line), interface("eth1", 2)]
            if first_line:
                await self.apply(node, "14-kernel-command-line", line)
                self.assertTrue((await self.facts(node))["boot_mac_waits"])
            await self.interfaces(node, *found)
            await self.apply(node, "14-kernel-command-line", line)
            self.assertEqual(await self.boot(node), "eth1")
            self.assertFalse((await self.facts(node))["boot_mac_waits"])
            self.assertEqual(await self.value("SELECT boot_method FROM node WHERE id = %s", node.id), "uefi")
            await self.database.execute("DELETE FROM node")

    async def test_a_boot_interface_that_people_chose_changes_only_with_what_the_node_booted_from(self) -> None:
        node = await self.make_node()
        await self.interfaces(node, interface("eth0", 1), interface("eth1", 2))
        ids = await self.interface_ids(node)
        await self.database.execute("UPDATE node SET boot_interface_id = %s", (ids["eth0"],))
        self.assertEqual(await self.apply(node, "14-kernel-command-line", b"quiet"), ())
        self.assertEqual(await self.boot(node), "eth0")
        line = f"BOOTIF={mac(2)}".encode()
        (finding,) = await self.apply(node, "14-kernel-command-line", line)
        self.assertEqual(finding.kind, HARDWARE_CHANGED)
        self.assertIn("booted from eth1", finding.description)
        # What people choose after that is not taken back by what was known before.
        await self.database.execute("UPDATE node SET boot_interface_id = %s", (ids["eth0"],))
        self.assertEqual(await self.interfaces(node, interface("eth0", 1), interface("eth1", 2)), [])
        self.assertEqual(await self.boot(node), "eth0")

    async def test_the_interface_of_another_node_is_never_booted_from(self) -> None:
        first, second = await self.make_node("alpha"), await self.make_node("beta")
        await self.interfaces(first, interface("eth0", 1))
        await self.apply(second, "14-kernel-command-line", f"BOOTIF={mac(1)}".encode())
        self.assertIsNone(await self.boot(second))


class DiskTests(HardwareTestCase):
    async def test_what_was_found_is_written(self) -> None:
        node = await self.make_node()
        await self.disks(node, disk("sdb"), disk("sda", "A", tran="sata", rota=False, id_path="p", **{"log-sec": 4096}))
        rows = await self.database.query(
            "SELECT name, identity, id_path, model, serial, size, block_size, tags, facts FROM block_device ORDER BY id"
        )
        self.assertEqual(
            rows,
            [
                ("sda", "serial:M:A", "p", "M", "A", 500 * GB, 4096, ["ssd", "sata"], {"paths": ["sda"]}),
                ("sdb", "name:sdb", "", "", "", 500 * GB, 512, [], {"paths": ["sdb"]}),
            ],
        )

    async def test_disks_keep_their_rows_when_names_are_swapped(self) -> None:
        node = await self.make_node()
        await self.disks(node, disk("sda", "A"), disk("sdb", "B"), disk("sdc", "C"))
        before = await self.disk_ids(node)
        await self.database.execute("UPDATE node SET boot_disk_id = %s", (before["sda"],))
        self.assertEqual(await self.disks(node, disk("sdb", "A"), disk("sda", "B"), disk("sdc", "C")), [])
        self.assertEqual(await self.disk_ids(node), {"sdb": before["sda"], "sda": before["sdb"], "sdc": before["sdc"]})
        self.assertEqual(await self.value("SELECT boot_disk_id FROM node"), before["sda"])

    async def test_a_disk_that_is_gone_is_removed_and_that_is_said(self) -> None:
        node = await self.make_node()
        await self.disks(node, disk("sda", "A"), disk("sdb", "B"))
        await self.database.execute("UPDATE node SET boot_disk_id = %s", ((await self.disk_ids(node))["sda"],))
        (finding,) = await self.disks(node, disk("sda", "B"))
        self.assertEqual(finding.kind, HARDWARE_CHANGED)
        self.assertIn("disk sda (M A, 500000000000 bytes) was not found any more", finding.description)
        self.assertIn("it was the node's boot disk", finding.description)
        self.assertIsNone(await self.value("SELECT boot_disk_id FROM node"))
        self.assertEqual(list(await self.disk_ids(node)), ["sda"])
        self.assertEqual(len(await self.disks(node)), 1)
        self.assertEqual(await self.disk_ids(node), {})

    async def test_a_disk_in_the_place_of_another_gets_a_row_of_its_own(self) -> None:
        node = await self.make_node()
        await self.disks(node, disk("sda", "A"))
        before = await self.disk_ids(node)
        await self.disks(node, disk("sda", "B"))
        self.assertNotEqual(await self.disk_ids(node), before)

    async def test_one_bad_disk_leaves_the_others(self) -> None:
        node = await self.make_node()
        findings = await self.disks(node, disk("sda", "A"), disk("sdb", "B", size=None), None, disk("sdc", "C"))
        self.assertEqual([finding.kind for finding in findings], [HARDWARE_NOT_USED] * 2)
        self.assertEqual(list(await self.disk_ids(node)), ["sda", "sdc"])

    async def test_the_longest_and_strangest_texts_are_stored(self) -> None:
        node = await self.make_node()
        strange = "\U0001f4be\x00\ud800\u2028\"'%s\\" * 200
        longest = disk("sda", strange, wwn=strange, id_path=strange, vendor=strange)
        self.assertEqual(await self.disks(node, {**longest, "model": strange}), [])
        sysfs = {"device": True, "driver": strange, "vendor": strange}
        self.assertEqual(await self.interfaces(node, interface("eth0", 1, sysfs=sysfs)), [])
        for finding in await self.disks(node):
            self.assertLessEqual(len(finding.description), MAX_DESCRIPTION)

    async def test_the_same_disks_at_two_nodes_are_two_disks(self) -> None:
        for name in ("alpha", "beta"):
            self.assertEqual(await self.disks(await self.make_node(name), disk("sda", "A")), [])
        self.assertEqual(await self.value("SELECT count(*) FROM block_device"), 2)


class AnyChangeTests(HardwareTestCase):
    """Whatever is found one time after another, at two nodes."""

    rounds = 25 * SOAK
    timeout = 30 * SOAK

    def setUp(self) -> Any:
        self.random = Random(20260901)
        return super().setUp()

    async def test_any_interfaces_after_any_others_are_written(self) -> None:
        nodes = [await self.make_node("alpha"), await self.make_node("beta")]
        for _ in range(self.rounds):
            node = self.random.choice(nodes)
            names, macs = self.random.sample(range(6), k=5), self.random.sample(range(6), k=5)
            found = list(zip(names, macs, strict=True))[: self.random.randint(1, 5)]
            before = {mac: id_ for id_, mac in await self.database.query("SELECT id, mac_address FROM interface")}
            theirs = {
                mac
                for (mac,) in await self.database.query(
                    "SELECT mac_address FROM interface WHERE node_id <> %s", (node.id,)
                )
            }
            findings = await self.interfaces(node, *(interface(f"eth{name}", number) for name, number in found))
            rows = await self.database.query(
                "SELECT name, mac_address, id FROM interface WHERE node_id = %s", (node.id,)
            )
            free = {(f"eth{name}", mac(number)) for name, number in found if mac(number) not in theirs}
            self.assertEqual({row[:2] for row in rows}, free)
            self.assertEqual(sum(finding.kind == MAC_ADDRESS_TAKEN for finding in findings), len(found) - len(free))
            for _, address, id_ in rows:
                self.assertEqual(id_, before.get(address, id_), "an interface that was known has another row")

    async def test_any_disks_after_any_others_are_written(self) -> None:
        node = await self.make_node()
        for _ in range(self.rounds):
            found = [
                disk(
                    f"sd{letter}", self.random.choice(["", "A", "B", "C"]), wwn=self.random.choice(["", "w1", "w2"]),
                    id_path=self.random.choice(["", "p1", "p2"]), size=self.random.choice([1, 2]) * 500 * GB,
                )
                for letter in self.random.sample("abcde", k=self.random.randint(0, 5))
            ]  # fmt: skip
            expected = (
                HOOKS["20-block-devices"].parse({"stdout": json.dumps({"blockdevices": found}).encode()}, 0).found
            )
            before = dict(await self.database.query("SELECT identity, id FROM block_device"))
            await self.disks(node, *found)
            rows = await self.database.query("SELECT name, identity, serial, size, id FROM block_device")
            self.assertEqual(
                {row[:4] for row in rows}, {(one.name, one.identity, one.serial, one.size) for one in expected}
            )
            for _, identity, _, _, id_ in rows:
                self.assertEqual(id_, before.get(identity, id_), "a disk that was known has another row")


class OtherTests(HardwareTestCase):
    async def test_memory_is_written_and_stays_where_nothing_is_said_of_it(self) -> None:
        node = await self.make_node()
        document = '<node class="system" id="a"><vendor>V</vendor><node class="memory" id="memory">{}</node></node>'
        await self.apply(node, "10-lshw", document.format('<size units="bytes">8589934592</size>').encode())
        (finding,) = await self.apply(node, "10-lshw", document.format("").encode())
        self.assertEqual(finding.kind, HARDWARE_NOT_USED)
        self.assertEqual(await self.value("SELECT memory FROM node"), 8192)
        self.assertEqual((await self.facts(node))["system"], {"vendor": "V"})

    async def test_processors_are_written(self) -> None:
        node = await self.make_node()
        await self.apply(node, "11-lscpu", b"CPU(s): 64\nModel name: A CPU\n")
        self.assertEqual(await self.value("SELECT cpu_count FROM node"), 64)
        self.assertEqual((await self.facts(node))["cpu"], {"model": "A CPU"})

    async def test_facts_of_one_script_leave_those_of_the_others(self) -> None:
        node = await self.make_node()
        await self.apply(node, "13-modaliases", b"pci:b\npci:a\n")
        await self.apply(node, "40-lldp", b"<lldp><interface name='eth0'><port><id>7</id></port></interface></lldp>")
        await self.apply(node, "12-virtuality", b"none\n")
        facts = await self.facts(node)
        self.assertEqual((facts["modaliases"], facts["virtuality"]), (["pci:a", "pci:b"], "none"))
        self.assertEqual([(one["interface"], one["port_id"]) for one in facts["neighbours"]], [("eth0", "7")])

    async def test_virtual_machines_have_the_tag(self) -> None:
        node = await self.make_node()
        tags = "SELECT count(*) FROM node_tag JOIN tag ON tag.id = tag_id WHERE name = 'virtual'"
        for said, count in ((b"none", 0), (b"kvm", 1), (b"vmware", 1), (b"none", 0), (b"kvm", 1)):
            self.assertEqual(await self.apply(node, "12-virtuality", said), ())
            self.assertEqual(await self.value(tags), count, said)
        # A tag that people gave a definition is theirs.
        await self.database.execute("UPDATE tag SET definition = '//x'")
        await self.apply(node, "12-virtuality", b"none")
        self.assertEqual(await self.value(tags), 1)

    async def test_of_a_script_that_failed_nothing_is_written(self) -> None:
        node = await self.make_node()
        self.assertEqual(await self.apply(node, "11-lscpu", b"CPU(s): 64\n", 1), ())
        self.assertEqual(await self.value("SELECT cpu_count FROM node"), 0)

    async def test_a_node_that_was_deleted_meanwhile_is_no_error(self) -> None:
        node = await self.make_node()
        await self.database.execute("DELETE FROM node")
        self.assertEqual(await self.interfaces(node, interface("eth0", 1)), ())
        self.assertEqual(await self.disks(node, disk("sda", "A")), ())
        self.assertEqual(await self.apply(node, "11-lscpu", b"CPU(s): 64\n"), ())
        self.assertEqual(await self.apply(node, "14-kernel-command-line", b"BOOTIF=02-00-00-00-00-01"), ())
        for said in (b"none", b"kvm"):
            self.assertEqual(await self.apply(node, "12-virtuality", said), ())
