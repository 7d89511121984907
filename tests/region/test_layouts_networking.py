"""Tests for :mod:`region.layouts.networking`."""

from __future__ import annotations

import json
from ipaddress import IPv4Network, IPv6Network, ip_interface, ip_network
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from region.layouts.networking import Address, Interface, Link, networking, plan
from region.nodes.kinds import NETWORK_NOT_CONFIGURED
from region.nodes.values import NodeName
from tests.database import DatabaseTestCase


def found(*texts: str) -> tuple[Address, ...]:
    """Addresses with their prefixes."""
    return tuple(map(ip_interface, texts))


addresses = st.tuples(st.ip_addresses(v=4).map(str), st.integers(0, 32)) | st.tuples(
    st.ip_addresses(v=6).map(str), st.integers(0, 128)
)
interface_sets = st.lists(
    st.builds(
        Interface,
        st.integers(1, 50),
        st.just("eth"),
        st.sampled_from(["physical", "physical", "bond", "bridge", "vlan", "alias"]),
        st.booleans(),
        st.booleans(),
        st.lists(addresses.map("{0[0]}/{0[1]}".format).map(ip_interface), max_size=3).map(tuple),
    ),
    max_size=6,
    unique_by=lambda one: one.id,
)


class PlanTests(SynchronousTestCase):
    @settings(max_examples=200, deadline=None)
    @given(interface_sets, st.none() | st.integers(0, 5), st.integers())
    def test_every_plan_can_be_carried_out(self, interfaces: list[Interface], index: int | None, seed: int) -> None:
        wanted = interfaces[index % len(interfaces)].id if index is not None and interfaces else index
        links = plan(interfaces, wanted)
        by_id = {one.id: one for one in interfaces}
        self.assertEqual(sorted(links), sorted(by_id))
        addressed = [number for number, each in links.items() if any(link.mode != "link_up" for link in each)]
        self.assertLessEqual(len(addressed), 1)
        usable = any(one.enabled and (one.type == "physical" or one.id == wanted) for one in interfaces)
        self.assertEqual(len(addressed), int(usable))
        if wanted in by_id and by_id[wanted].enabled:
            self.assertEqual(addressed, [wanted])
        for number, each in links.items():
            self.assertTrue(by_id[number].enabled or not each)
            subnets = [link.subnet for link in each]
            self.assertEqual(len(set(subnets)), len(subnets))
            for link in each:
                self.assertEqual(link.mode == "dhcp", link.subnet is None and number in addressed)
                if link.subnet is not None:
                    network: IPv4Network | IPv6Network = ip_network(link.subnet)
                    self.assertIn(network, [address.network for address in by_id[number].discovered])
                    self.assertGreater(network.num_addresses, 1)
        shuffled = list(interfaces)
        Random(seed).shuffle(shuffled)
        self.assertEqual(plan(shuffled, wanted), links)

    def test_the_boot_interface_has_an_address_of_each_of_its_subnets(self) -> None:
        boot = Interface(2, "eth1", discovered=found("10.0.0.5/24", "2001:db8::5/64", "10.0.0.6/24", "fe80::1/64"))
        other = Interface(1, "eth0", discovered=found("192.168.1.7/24"))
        self.assertEqual(
            plan([boot, other], 2),
            {2: (Link("auto", "10.0.0.0/24"), Link("auto", "2001:db8::/64")), 1: (Link("link_up", "192.168.1.0/24"),)},
        )

    def test_without_a_subnet_it_asks_dhcp(self) -> None:
        for of_no_use in ((), found("fe80::1/64"), found("169.254.7.7/16"), found("10.0.0.5/32"), found("::1/128")):
            self.assertEqual(plan([Interface(1, "eth0", discovered=of_no_use)], 1), {1: (Link("dhcp"),)})

    def test_the_others_are_brought_up_if_that_is_of_use(self) -> None:
        self.assertEqual(
            plan(
                [
                    Interface(1, "eth0"), Interface(2, "eth1"), Interface(3, "eth2", enabled=False),
                    Interface(4, "eth3", link_connected=False), Interface(5, "bond0", "bond"),
                    Interface(6, "eth0:1", "alias"),
                ],
                1,
            ),
            {1: (Link("dhcp"),), 2: (Link("link_up"),), 3: (), 4: (), 5: (Link("link_up"),), 6: ()},
        )  # fmt: skip

    def test_an_interface_that_nobody_chose_is_the_first_physical_one_with_a_carrier(self) -> None:
        one = Interface(1, "eth0", link_connected=False)
        two, three, bond = Interface(2, "eth1"), Interface(3, "eth2"), Interface(0, "bond0", "bond")
        self.assertEqual(plan([bond, three, two, one], None)[2], (Link("dhcp"),))
        self.assertEqual(plan([bond, one], None)[1], (Link("dhcp"),))
        self.assertEqual(plan([bond, three, two], 77)[2], (Link("dhcp"),))


class NetworkingTests(DatabaseTestCase):
    async def node(self, *interfaces: tuple[str, str, str]) -> NodeName:
        row = await self.database.one(
            "INSERT INTO node (system_id, hostname, architecture) VALUES ('abc123', 'one', 'amd64/generic') "
            "RETURNING id"
        )
        assert row is not None
        for name, mac, discovered in interfaces:
            await self.database.execute(
                "INSERT INTO interface (node_id, name, mac_address, discovered) VALUES (%s, %s, %s, %s)",
                (row[0], name, mac, discovered),
            )
        return NodeName(row[0], "abc123", "one")

    async def links(self) -> dict[str, object]:
        return dict(await self.database.query("SELECT name, links FROM interface"))

    async def test_links_are_stored_in_place_of_what_was_there(self) -> None:
        node = await self.node(
            ("eth0", "52:54:00:00:00:01", "[]"),
            ("eth1", "52:54:00:00:00:02", json.dumps([{"address": "10.0.0.5", "prefix": 24}])),
        )
        await self.database.execute(
            'UPDATE interface SET links = \'[{"mode": "static", "subnet": null}]\' WHERE name = \'eth1\''
        )
        await self.database.execute(
            "UPDATE node SET boot_interface_id = (SELECT id FROM interface WHERE name = 'eth1')"
        )
        for _ in range(2):
            self.assertEqual(await self.database.transact(lambda tx: networking(tx, node)), ())
            self.assertEqual(
                await self.links(),
                {
                    "eth0": [{"mode": "link_up", "subnet": None}],
                    "eth1": [{"mode": "auto", "subnet": "10.0.0.0/24"}],
                },
            )

    async def test_a_node_without_an_interface_is_an_event(self) -> None:
        node = await self.node()
        [finding] = await self.database.transact(lambda tx: networking(tx, node))
        self.assertEqual(finding.kind, NETWORK_NOT_CONFIGURED)
        self.assertIn("no interface that can be used", finding.description)
        gone = NodeName(77, "zzzzzz", "gone")
        self.assertEqual(await self.database.transact(lambda tx: networking(tx, gone)), ())

    async def test_an_address_that_is_none_names_its_interface(self) -> None:
        node = await self.node(("eth0", "52:54:00:00:00:01", '[{"address": "10.0.0.500", "prefix": 24}]'))
        with self.assertRaisesRegex(ValueError, r"interface eth0 .*10\.0\.0\.500"):
            await self.database.transact(lambda tx: networking(tx, node))
