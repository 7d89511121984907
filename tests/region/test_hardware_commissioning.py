"""From what a node signals to what is known of its hardware: intake, worker, hooks, default layouts, on a database."""

from __future__ import annotations

import json
from collections.abc import Mapping

from region.api.machine_documents import whole_machine
from region.commissioning.intake import Intake
from region.commissioning.signals import Signal, SignalStatus
from region.commissioning.steps import steps
from region.hardware.hooks import HOOKS
from region.layouts.networking import networking
from region.layouts.storage import storage
from region.nodes import kinds
from region.nodes.statuses import NodeStatus, ScriptStatus
from region.nodes.store import NodeStore
from region.scripts.results import ResultStore
from tests.region.commissioning import WorkerTestCase, following

GB = 10**9

OUTPUTS: Mapping[str, bytes] = {
    "11-lscpu": b"Architecture: aarch64\nCPU(s): 64\nOn-line CPU(s) list: 0-62\nModel name: A CPU\n",
    "20-block-devices": json.dumps({
        "blockdevices": [
            {"name": "sda", "size": 500 * GB, "model": "M", "serial": "A", "rota": False},
            {"name": "sdb", "size": 2000 * GB, "model": "M", "serial": "B", "rota": True},
        ]
    }).encode(),
    "30-network-interfaces": json.dumps([
        {"ifname": "eth0", "flags": ["UP", "LOWER_UP"], "address": "02:00:00:00:00:01",
         "addr_info": [{"local": "10.0.0.5", "prefixlen": 24, "scope": "global"}]},
        {"ifname": "eth1", "flags": ["UP", "LOWER_UP"], "address": "02:00:00:00:00:02"},
    ]).encode(),
    "10-lshw": b'<list><node id="a" class="system"><node id="memory" class="memory"><size units="bytes">8589934592'
               b"</size></node></node></list>",
    "12-virtuality": b"none\n",
    "13-modaliases": b"pci:v00001AF4d00001041\n",
    "14-kernel-command-line": b"quiet BOOTIF=01-02-00-00-00-00-01\nboot method: uefi\n",
    "40-lldp": b'<lldp><interface name="eth0"><port><id>7</id></port></interface></lldp>',
}  # fmt: skip
"""By script, in the order in which scripts run: by what hardware they are of, and then by name."""


class CommissioningTests(WorkerTestCase):
    hooks = tuple(HOOKS)

    async def prepare(self) -> None:
        self.intake = Intake(self.database, self.hooks, self.wake)
        self.node = await self.make_node()
        self.results = await self.begin(self.node, commissioning=tuple(OUTPUTS))

    async def commission(self, **changed: bytes) -> None:
        """All of it, with other outputs of the scripts whose names end so."""
        for script, output in OUTPUTS.items():
            other = changed.get(script.rpartition("-")[2], output)
            await self.intake.signal(self.node, self.finished(script, out=other))
        await self.intake.signal(self.node, Signal(SignalStatus.OK))
        await self.process(steps(following(self.database, hooks=HOOKS, storage=storage, networking=networking)))
        await self.until_done()

    async def known(self) -> list[object]:
        """Processors, MiB of memory, disks by name, MACs by name, and the boot interface."""
        row = await self.database.one(
            "SELECT cpu_count, memory, boot_interface_id FROM node WHERE id = %s", (self.node.id,)
        )
        assert row is not None
        disks = await self.database.query("SELECT name, serial FROM block_device WHERE node_id = %s", (self.node.id,))
        interfaces = await self.database.query(
            "SELECT id, name, right(mac_address, 2) FROM interface WHERE node_id = %s", (self.node.id,)
        )
        boot = next((name for id_, name, _ in interfaces if id_ == row[2]), None)
        return [row[0], row[1], dict(disks), {name: mac for _, name, mac in interfaces}, boot]

    async def test_a_node_is_ready_with_all_that_was_found(self) -> None:
        await self.commission()
        self.assertEqual(await self.status_of(self.node), NodeStatus.READY)
        self.assertEqual(await self.known(), [63, 8192, {"sda": "A", "sdb": "B"}, {"eth0": "01", "eth1": "02"}, "eth0"])
        row = await self.database.one("SELECT boot_method, storage <> '{}' FROM node WHERE id = %s", (self.node.id,))
        self.assertEqual(row, ("uefi", True))

    async def test_one_bad_disk_and_a_mac_of_another_node_are_events_of_a_node_that_is_ready(self) -> None:
        other = await self.make_node()
        await self.database.execute(
            "INSERT INTO interface (node_id, name, mac_address) VALUES (%s, 'eth5', '02:00:00:00:00:02')", (other.id,)
        )
        broken = OUTPUTS["20-block-devices"].replace(str(2000 * GB).encode(), b'"?"')
        await self.commission(devices=broken)
        self.assertEqual(await self.status_of(self.node), NodeStatus.READY)
        self.assertEqual(await self.known(), [63, 8192, {"sda": "A"}, {"eth0": "01"}, "eth0"])
        ((described, _),) = await self.events_of(self.node, kinds.HARDWARE_NOT_USED)
        self.assertIn("disk sdb is left out: its size is '?'", described)
        ((described, _),) = await self.events_of(self.node, kinds.MAC_ADDRESS_TAKEN)
        self.assertIn(f"which node {other.hostname} ({other.system_id}) has too", described)

    async def test_an_output_that_cannot_be_used_fails_the_commissioning_and_nothing_else(self) -> None:
        await self.commission(lshw=OUTPUTS["10-lshw"][:-30])
        self.assertEqual(await self.status_of(self.node), NodeStatus.FAILED_COMMISSIONING)
        self.assertEqual(await self.known(), [63, 0, {"sda": "A", "sdb": "B"}, {"eth0": "01", "eth1": "02"}, "eth0"])
        self.assertEqual(await self.result("10-lshw", "status", "exit_status", "post_processing"), (2, 0, "failed"))
        self.assertEqual(await self.result("11-lscpu"), ScriptStatus.PASSED)
        ((described, correlation),) = await self.events_of(self.node, kinds.SCRIPT_RESULT_ERROR)
        # Not the region is to blame, and nobody is told to report it.
        for said in (
            "The output of script 10-lshw cannot be used: the script did not print an XML document, or it was cut",
            f"stanchion node output {self.node.hostname}", correlation,
        ):  # fmt: skip
            self.assertIn(said, described)
        self.assertNotIn("report it", described)
        ((reason, _),) = await self.events_of(self.node, kinds.REQUEST_NODE_MARK_FAILED_SYSTEM)
        self.assertIn("What scripts wrote cannot be used: 10-lshw (the script did not print an XML document", reason)
        self.assertNotIn("region", reason)
        store = NodeStore(self.database)
        node = await store.read(self.node.system_id)
        assert node is not None
        [problem] = whole_machine(node, await store.problems(node))["problems"]
        self.assertEqual((problem["fault"], problem["correlation"]), ("output", correlation))
        [run] = await ResultStore(self.database).runs(self.node.system_id)
        [warning] = [result.warning for result in run.results if result.warning]
        self.assertIn("What the script wrote cannot be used: the script did not print an XML document", warning)
        self.assertEqual(len(self.flushLoggedErrors()), 1)
