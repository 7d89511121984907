"""The machines over HTTP, with a real database: as clients of MAAS make, find, change and commission them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from twisted.internet import reactor as installed_reactor
from twisted.internet.task import Clock, deferLater

from region.api import Api, Authenticator
from region.config import CommissioningConfig
from region.events import EventStore
from region.nodes.life import Input
from region.nodes.requests import NodeRequests
from region.nodes.statuses import NodeStatus, ResultType
from region.nodes.store import PAGE, NodeStore
from region.scripts.choose import ScriptsUnknown
from tests.database import DatabaseTestCase
from tests.region.api_parts import parts_of
from tests.region.fakes import Keys
from tests.region.machines import Choice, happen, make_node, make_script, status_of
from tests.region.web import Connection, Response, form

reactor: Any = installed_reactor
MAC = "00:16:3e:00:00:0a"


class MachinesTestCase(DatabaseTestCase):
    """An API over a database that has one script of each type."""

    async def prepare(self) -> None:
        self.scripts = {
            ResultType.COMMISSIONING: await make_script(self.database, "10-lshw"),
            ResultType.TESTING: await make_script(self.database, "memtest", ResultType.TESTING),
        }

    def setUp(self) -> Any:
        ready = super().setUp()
        self.asked: list[tuple[ResultType, Sequence[str] | None]] = []
        parts = parts_of(
            events=EventStore(self.database),
            nodes=NodeStore(self.database),
            node_requests=NodeRequests(self.database, CommissioningConfig(), self.choose),
        )
        self.clock = Clock()
        self.resource = Api(parts, Authenticator(Keys(), self.clock)).resource()
        return ready.addCallback(lambda _: self.run_async(self.prepare()))

    async def choose(
        self, transaction: Any, result_type: ResultType, names_or_tags: Sequence[str] | None = None
    ) -> Sequence[Choice]:
        self.asked.append((result_type, names_or_tags))
        script = self.scripts[result_type]
        if names_or_tags and set(names_or_tags) - {script.script_name, "none"}:
            raise ScriptsUnknown(f"there is no script {names_or_tags}")
        return [] if names_or_tags == ["none"] else [script]

    async def ask(self, method: str, path: str, **keywords: Any) -> Response:
        connection = Connection(self.resource, self.clock)
        connection.send(method, path, **keywords)
        while not connection.is_answered:
            # The database is a real one, so its answer comes through the real reactor.
            await deferLater(reactor, 0.001)
        return connection.response(method)

    async def create(self, **fields: Any) -> Response:
        return await self.ask(
            "POST",
            "machines/",
            **form(**{"architecture": "amd64", "mac_addresses": MAC, "commission": "false"} | fields),
        )


class CreateTests(MachinesTestCase):
    async def test_a_machine_is_made_with_a_name_of_its_own_and_begins_to_be_commissioned_as_maas_does_it(self) -> None:
        response = await self.ask(
            "POST", "machines/",
            **form(architecture="amd64", mac_addresses=[MAC.upper(), "00-16-3e-00-00-0b"], power_type="manual",
                   testing_scripts="none", skip_storage="True"),
        )  # fmt: skip
        self.assertEqual(response.status, 200, response.text)
        machine = response.json
        self.assertEqual((machine["status"], machine["status_name"]), (1, "Commissioning"))
        self.assertEqual(machine["hostname"], f"node-{machine['system_id']}")
        self.assertEqual(machine["architecture"], "amd64/generic")
        self.assertEqual([each["mac_address"] for each in machine["interface_set"]], [MAC, "00:16:3e:00:00:0b"])
        self.assertEqual(machine["boot_interface"]["mac_address"], MAC)
        self.assertEqual((machine["commissioning_status_name"], machine["testing_status"]), ("Pending", -1))
        self.assertEqual(self.asked, [(ResultType.COMMISSIONING, None), (ResultType.TESTING, ["none"])])
        [options] = await self.database.query("SELECT options FROM script_set")
        self.assertEqual(
            options[0],
            {"enable_ssh": False, "skip_bmc_config": False, "skip_networking": False, "skip_storage": True},
        )
        events = (await self.ask("GET", f"events/?op=query&mac_address={MAC}")).json["events"]
        self.assertEqual(
            [(each["type"], each["username"]) for each in reversed(events)],
            [
                ("Node created", "someone"), ("User starting node commissioning", "someone"),
                ("Node changed status", "someone"),
            ],
        )  # fmt: skip
        self.assertTrue(all(each["correlation"] for each in events))

    async def test_what_is_wrong_is_said_by_field_and_nothing_is_made(self) -> None:
        self.assertEqual((await self.create(hostname="taken")).status, 200)
        other = {"mac_addresses": "00:16:3e:00:00:0b"}
        for fields, name, said in (
            ({}, "mac_addresses", f"{MAC} is of node taken ("),
            ({"mac_addresses": [MAC, "nonsense"]}, "mac_addresses", "'nonsense' is not a MAC address"),
            ({"mac_addresses": [MAC, MAC.upper()]}, "mac_addresses", "given twice"),
            ({**other, "hostname": "Taken"}, "hostname", "Another node is called 'taken'."),
            ({**other, "hostname": "under_score"}, "hostname", "'under_score' is not a host name"),
            ({**other, "hostname": "x" * 64}, "hostname", "is not a host name"),
            ({**other, "architecture": "amd 64"}, "architecture", "'amd 64' is not an architecture"),
            ({**other, "power_type": "ipmi"}, "power_type", "'ipmi' is not a valid power_type"),
            ({**other, "power_parameters": "[1]"}, "power_parameters", "not a JSON object"),
            ({**other, "power_parameters": '{"a": "\\u0000"}'}, "power_parameters", "NUL"),
            ({**other, "power_parameters": '{"a": NaN}'}, "power_parameters", "not JSON"),
            ({**other, "commission": "1", "testing_scripts": "nope"}, "testing_scripts", "there is no script"),
            ({**other, "commission": "1", "commissioning_scripts": "a,b"}, "commissioning_scripts", "['a', 'b']"),
            ({**other, "domain": "here"}, "domain", "no such parameter"),
        ):  # fmt: skip
            response = await self.create(**fields)
            self.assertEqual((response.status, list(response.json)), (400, [name]), fields)
            self.assertIn(said, response.json[name][0])
        self.assertEqual(await self.database.query("SELECT count(*) FROM node"), [(1,)])
        self.assertEqual(len((await self.ask("GET", "events/?op=query")).json["events"]), 1)


class MachineTests(MachinesTestCase):
    async def test_what_clients_of_maas_need_is_there_with_the_right_types(self) -> None:
        system_id = (await self.create(hostname="a.example")).json["system_id"]
        await self.database.execute(
            """INSERT INTO block_device (node_id, name, identity, size, serial, tags)
               SELECT id, 'sda', 'x', 4000000000, 'S1', '{ssd}' FROM node"""
        )
        await self.database.execute("UPDATE node SET boot_disk_id = (SELECT id FROM block_device), memory = 2048")
        await self.database.execute(
            """UPDATE interface SET discovered = '[{"address": "10.0.0.5", "prefix": 24}, {"prefix": "x"}]',
                   links = '[{"mode": "auto", "subnet": "10.0.0.0/24"}]'"""
        )
        machine = (await self.ask("GET", "machines/a.example/")).json
        self.assertEqual(machine, (await self.ask("GET", f"nodes/{system_id}/")).json)
        for name, kind in {
            "resource_uri": str, "system_id": str, "hostname": str, "fqdn": str, "tag_names": list, "owner_data": dict,
            "osystem": str, "distro_series": str, "architecture": str, "memory": int, "cpu_count": int,
            "hardware_info": dict, "ip_addresses": list, "power_state": str, "status_name": str, "status_message": str,
            "boot_interface": dict, "interface_set": list, "zone": dict, "pool": dict, "domain": dict,
            "boot_disk": dict, "physicalblockdevice_set": list,
            "blockdevice_set": list, "status": int, "node_type": int, "locked": bool,
            "netboot": bool, "storage": float, "bcaches": list, "volume_groups": list,
        }.items():  # fmt: skip
            self.assertIs(type(machine[name]), kind, name)
        self.assertEqual(machine["zone"]["resource_uri"], "/MAAS/api/2.0/zones/default/")
        self.assertEqual((machine["storage"], machine["boot_disk"]["serial"]), (4000.0, "S1"))
        [interface] = machine["interface_set"]
        self.assertEqual(interface["links"], [{"id": 0, "mode": "auto", "subnet_cidr": "10.0.0.0/24"}])
        self.assertEqual(
            interface["discovered"],
            [{"ip_address": "10.0.0.5", "subnet_cidr": "10.0.0.0/24"}, {"ip_address": "", "subnet_cidr": None}],
        )
        self.assertEqual(machine["allowed"], ["commission", "mark_broken"])

    async def test_it_is_changed_and_forgotten_and_its_events_stay(self) -> None:
        machine = (await self.create(hostname="before", description="old")).json
        path = f"machines/{machine['system_id']}/"
        fields = {"hostname": "after", "architecture": "arm64", "power_parameters": '{"power_address": "x"}'}
        changed = (await self.ask("PUT", path, **form(**fields))).json
        self.assertEqual(
            (changed["hostname"], changed["architecture"], changed["description"]), ("after", "arm64/generic", "old")
        )
        self.assertEqual((await self.ask("GET", f"{path}?op=power_parameters")).json, {"power_address": "x"})
        self.assertEqual(
            (await self.ask("GET", "machines/?op=power_parameters")).json,
            {machine["system_id"]: {"power_address": "x"}},
        )
        self.assertNotIn("power_parameters", changed)
        await self.create(hostname="other", mac_addresses="00:16:3e:00:00:0b")
        refused = await self.ask("PUT", path, **form(hostname="other"))
        self.assertEqual((refused.status, list(refused.json)), (400, ["hostname"]))
        self.assertEqual((await self.ask("DELETE", path)).status, 204)
        for method in ("GET", "PUT", "DELETE"):
            self.assertEqual((await self.ask(method, path)).status, 404)
        events = (await self.ask("GET", f"events/?op=query&id={machine['system_id']}")).json["events"]
        self.assertEqual([(each["type"], each["hostname"]) for each in events],
                         [("Node deleted", "after"), ("Node created", "before")])  # fmt: skip

    async def test_it_is_commissioned_and_aborted_and_each_refusal_says_what_is_allowed(self) -> None:
        path = f"machines/{(await self.create()).json['system_id']}/"
        self.assertIsNone((await self.ask("GET", f"{path}?op=get_token")).json)
        response = await self.ask(
            "POST", path, **form(op="commission", commissioning_scripts="10-lshw", testing_scripts="memtest")
        )
        self.assertEqual((response.status, response.json["status_name"]), (200, "Commissioning"))
        self.assertEqual(
            (response.json["commissioning_status_name"], response.json["testing_status_name"]), ("Pending", "Pending")
        )
        token = (await self.ask("GET", f"{path}?op=get_token")).json
        self.assertEqual(sorted(map(len, token.values())), [18, 18, 32])
        again = await self.ask("POST", path, **form(op="commission"))
        self.assertEqual(again.status, 409)
        self.assertIn("'Commissioning' cannot take 'commission'; it can take: abort", again.text)
        aborted = await self.ask("POST", path, **form(op="abort", comment="wrong machine"))
        self.assertEqual((aborted.json["status_name"], aborted.json["status_message"]), ("New", "wrong machine"))
        self.assertEqual(aborted.json["commissioning_status_name"], "Aborted")
        self.assertEqual((await self.ask("POST", path, **form(op="abort"))).status, 409)
        broken = await self.ask("POST", path, **form(op="mark_broken", comment="It smells."))
        self.assertEqual((broken.json["status_name"], broken.json["status_message"]), ("Broken", "It smells."))
        self.assertEqual((await self.ask("POST", path, **form(op="mark_fixed"))).json["status_name"], "New")

    async def test_tests_alone_need_a_test(self) -> None:
        node = await make_node(self.database, status=NodeStatus.READY)
        path = f"machines/{node.system_id}/"
        none = await self.ask("POST", path, **form(op="test", testing_scripts="none"))
        self.assertEqual((none.status, list(none.json)), (400, ["testing_scripts"]))
        self.assertIs(await status_of(self.database, node), NodeStatus.READY)
        self.assertEqual((await self.ask("POST", path, **form(op="test"))).json["status_name"], "Testing")

    async def test_what_is_not_there_is_not_found(self) -> None:
        for method, path, fields in (
            ("GET", "machines/nobody/", {}), ("GET", "machines/nobody/?op=get_token", {}),
            ("GET", "machines/nobody/?op=power_parameters", {}), ("POST", "machines/nobody/", {"op": "commission"}),
            ("POST", "machines/nobody/", {"op": "abort"}), ("GET", "machines/?after=nobody", {}),
        ):  # fmt: skip
            response = await self.ask(method, path, **(form(**fields) if fields else {}))
            self.assertEqual(response.status, 404, path)
            self.assertIn("'nobody'", response.text)
        for path in ("machines/%00/", "machines/%00/?op=get_token", "nodes/%F0%9F%92%A5/", "machines/' OR 1=1 --/"):
            self.assertEqual((await self.ask("GET", path.replace(" ", "%20"))).status, 404, path)


class ListTests(MachinesTestCase):
    async def names(self, query: str) -> list[str]:
        response = await self.ask("GET", f"machines/?{query}")
        self.assertEqual(response.status, 200, response.text)
        return [each["hostname"] for each in response.json]

    async def test_filters_are_of_machines_that_have_one_value_of_each_and_every_tag(self) -> None:
        for number, name in enumerate(("one", "two", "three")):
            await self.create(hostname=name, mac_addresses=f"00:16:3e:00:00:0{number}")
        await self.database.execute("INSERT INTO tag (name) VALUES ('big'), ('fast')")
        await self.database.execute(
            """INSERT INTO node_tag SELECT node.id, tag.id FROM node CROSS JOIN tag
               WHERE hostname = 'two' OR (hostname = 'one' AND name = 'big')"""
        )
        two = (await self.ask("GET", "machines/two/")).json
        self.assertEqual(two["tag_names"], ["big", "fast"])
        await self.ask("POST", "machines/two/", **form(op="mark_broken"))
        for query, names in (
            ("", ["one", "two", "three"]), ("hostname=Two&hostname=one", ["one", "two"]),
            (f"id={two['system_id']}", ["two"]), ("mac_address=00-16-3E-00-00-02", ["three"]),
            ("tags=big", ["one", "two"]), ("tags=big&tags=fast", ["two"]), ("tags=big,fast", ["two"]),
            ("tags=none", []), ("status=broken", ["two"]), ("status=8", ["two"]), ("status=new&hostname=one", ["one"]),
            ("architecture=amd64", ["one", "two", "three"]), ("architecture=arm64/generic", []), ("zone=other", []),
            ("zone=default&pool=default", ["one", "two", "three"]), ("hostname=two&status=new", []),
            ("domain=here", []), ("agent_name=0123-4567", []), ("agent_name=&hostname=one", ["one"]),
        ):  # fmt: skip
            self.assertEqual(await self.names(query), names, query)
        for query, said in (("status=lost", "'Failed commissioning'"), ("mac_address=x", "'x'"), ("limit=0", "0")):
            response = await self.ask("GET", f"machines/?{query}")
            self.assertEqual(response.status, 400)
            self.assertIn(said, response.text)

    async def test_all_are_shown_however_many_there_are_and_a_page_says_where_the_next_one_is(self) -> None:
        await self.database.execute(
            """INSERT INTO node (system_id, hostname, architecture)
               SELECT lpad(n::text, 6, 'a'), 'node-' || n, 'amd64/generic' FROM generate_series(1, %s) AS n""",
            (4 * PAGE + 5,),
        )
        self.assertEqual(len(await self.names("")), 4 * PAGE + 5)
        self.assertEqual(len(await self.names("limit=150")), 150)
        seen: list[str] = []
        path = "machines/?limit=80&status=new&status=ready"
        for _ in range(3):
            response = await self.ask("GET", path)
            seen += [each["hostname"] for each in response.json]
            link = response.headers["Link"]
            path = link and link[1 : link.index(">")].removeprefix("http://region.example.com:5240")
        self.assertEqual(seen, [f"node-{n}" for n in range(1, 4 * PAGE + 6)])
        self.assertIsNone(link)

    async def test_secrets_are_not_in_what_everybody_reads(self) -> None:
        node = await make_node(self.database, status=NodeStatus.READY)
        await self.database.execute("""UPDATE node SET power_parameters = '{"power_pass": "geheim"}'""")
        await happen(self.database, node, Input.COMMISSION)
        for path in ("machines/", f"machines/{node.system_id}/"):
            self.assertNotIn("geheim", (await self.ask("GET", path)).text)
        node_ = await NodeStore(self.database).read(node.system_id)
        self.assertNotIn("geheim", repr(node_))
        json.dumps((await self.ask("GET", "machines/")).json)
