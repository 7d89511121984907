"""How are a node's interfaces configured by default? From what was found on them when it was commissioned.

The interface that it boots from gets an address of each of its subnets, or by DHCP if none is known. Every other one
that is enabled and has a carrier is brought up without an address.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Interface, IPv6Interface, ip_interface
from typing import Any

from attrs import frozen

from region.database import Transaction
from region.nodes.findings import Finding
from region.nodes.kinds import NETWORK_NOT_CONFIGURED
from region.nodes.values import NodeName

Address = IPv4Interface | IPv6Interface


@frozen
class Interface:
    """An interface that there is, with the addresses that were found on it."""

    id: int
    name: str
    type: str = "physical"
    enabled: bool = True
    link_connected: bool = True
    discovered: tuple[Address, ...] = ()


@frozen
class Link:
    """``mode`` is auto, dhcp or link_up (or static, which only people choose); ``subnet`` a CIDR, None if unknown."""

    mode: str
    subnet: str | None = None

    @property
    def document(self) -> dict[str, Any]:
        """As it is stored."""
        return {"mode": self.mode, "subnet": self.subnet}


def plan(interfaces: Sequence[Interface], boot_interface_id: int | None) -> Mapping[int, tuple[Link, ...]]:
    """The links of every interface, by its number.

    :param boot_interface_id: the interface that the node boots from; None, or one that is disabled or not there, for
        the first physical one that is enabled.
    """
    boot = _boot_interface(interfaces, boot_interface_id)
    return {
        interface.id: _boot_links(interface) if interface is boot else _other_links(interface)
        for interface in sorted(interfaces, key=lambda one: one.id)
    }


def _boot_interface(interfaces: Sequence[Interface], wanted: int | None) -> Interface | None:
    usable = sorted((one for one in interfaces if one.enabled), key=lambda one: one.id)
    chosen = [one for one in usable if one.id == wanted]
    # Of those that nobody chose, one with a carrier is more likely to be it.
    physical = sorted((one for one in usable if one.type == "physical"), key=lambda one: not one.link_connected)
    return next(iter(chosen or physical), None)


def _boot_links(interface: Interface) -> tuple[Link, ...]:
    return tuple(Link("auto", subnet) for subnet in subnets(interface)) or (Link("dhcp"),)


def _other_links(interface: Interface) -> tuple[Link, ...]:
    if not interface.enabled or not interface.link_connected or interface.type == "alias":
        return ()  # a system would wait for it while it boots
    return (Link("link_up", next(iter(subnets(interface)), None)),)


def subnets(interface: Interface) -> tuple[str, ...]:
    """The subnets of an interface's addresses, each once, in their order.

    Not those of link-local and loopback addresses, nor of an address that is alone in its subnet.
    """
    found = dict.fromkeys(
        str(address.network)
        for address in interface.discovered
        if address.network.prefixlen < address.max_prefixlen
        and not (address.is_link_local or address.is_loopback or address.is_unspecified or address.is_multicast)
    )
    return tuple(found)


async def networking(transaction: Transaction, node: NodeName) -> Sequence[Finding]:
    """Configure all interfaces of a node, in place of whatever they had; a finding if it has none to use."""
    row = await transaction.one("SELECT boot_interface_id FROM node WHERE id = %s FOR NO KEY UPDATE", (node.id,))
    if row is None:
        return ()  # it was deleted, with its interfaces
    rows = await transaction.query(
        "SELECT id, name, type, enabled, link_connected, discovered FROM interface WHERE node_id = %s ORDER BY id",
        (node.id,),
    )
    interfaces = [
        Interface(number, name, kind, enabled, link_connected, _addresses(name, found))
        for number, name, kind, enabled, link_connected, found in rows
    ]
    links = plan(interfaces, row[0])
    await transaction.execute(
        """UPDATE interface SET links = new.links::jsonb, updated = now()
           FROM unnest(%s::bigint[], %s::text[]) AS new (id, links)
           WHERE interface.id = new.id AND interface.links <> new.links::jsonb""",
        (list(links), [json.dumps([link.document for link in each]) for each in links.values()]),
    )
    if any(link.mode in ("auto", "dhcp") for each in links.values() for link in each):
        return ()
    return (
        Finding(
            NETWORK_NOT_CONFIGURED,
            "It has no interface that can be used, so it is not on any network once it is installed. Look at the "
            "output of 30-network-interfaces, enable an interface, and commission it again.",
        ),
    )


def _addresses(name: str, discovered: Sequence[Mapping[str, Any]]) -> tuple[Address, ...]:
    try:
        return tuple(ip_interface(f"{one['address']}/{one['prefix']}") for one in discovered)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"interface {name} has addresses stored that are none: {error!r}") from error
