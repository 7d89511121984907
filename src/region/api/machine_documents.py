"""A node in the form that clients of MAAS read a machine in, with what MAAS has no word for beside it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from ipaddress import ip_interface
from typing import Any, Final

from region.answers import wording
from region.answers.documents import BASE
from region.nodes.findings import OutputUnusable
from region.nodes.statuses import ScriptStatus, status_of_run
from region.nodes.store import BlockDevice, Interface, Node, Problem

_MEGABYTE: Final = 1_000_000.0

_ZONE: Final = {"id": 1, "name": "default", "description": "", "resource_uri": f"{BASE}/zones/default/"}
_POOL: Final = {"id": 0, "name": "default", "description": "Default pool", "resource_uri": f"{BASE}/resourcepool/0/"}
_DOMAIN: Final = {
    "id": 0, "name": "", "ttl": None, "authoritative": True, "is_default": True, "resource_record_count": 0,
    "resource_uri": f"{BASE}/domains/0/",
}  # fmt: skip
"""What MAAS has and this region has one of: clients want to see it."""

_NO_GATEWAY: Final = {"gateway_ip": None, "link_id": None}


def whole_machine(node: Node, problems: Sequence[Problem]) -> dict[str, Any]:
    """A node as a machine of MAAS, with what only its own page has: facts, storage, and steps that failed."""
    return {
        **machine(node),
        "facts": dict(node.facts),
        "storage_configuration": dict(node.storage),
        "problems": [
            {
                "step": each.step,
                "script": each.script,
                "fault": "output" if each.error_type == OutputUnusable.__name__ else "region",
                "error_type": each.error_type,
                "error": each.error,
                "correlation": each.correlation,
                "occurred": wording.when(each.occurred.timestamp()),
            }
            for each in problems
        ],
    }


def machine(node: Node) -> dict[str, Any]:
    """A node as a machine of MAAS."""
    name = node.name
    interfaces = [_interface(node, each) for each in node.interfaces]
    disks = [_block_device(node, each) for each in node.block_devices]
    return {
        "system_id": name.system_id,
        "hostname": name.hostname,
        "fqdn": name.hostname,
        "domain": _DOMAIN,
        "description": node.description,
        "architecture": node.architecture,
        "status": int(node.status),
        "status_name": node.status.label,
        "status_message": node.status_message,
        "status_action": "",
        "status_changed": wording.when(node.status_changed.timestamp()),
        "allowed": sorted(each.value for each in node.allowed),
        "last_heard": _when(node.last_ping),
        "heard": node.heard,
        "node_type": 0,
        "node_type_name": "Machine",
        "owner": node.owner or None,
        "owner_data": {},
        "power_type": node.power_type,
        "power_state": "unknown",
        "boot_method": node.boot_method,
        "osystem": node.osystem,
        "distro_series": node.distro_series,
        "hwe_kernel": node.hwe_kernel,
        "min_hwe_kernel": "",
        "memory": node.memory,
        "cpu_count": node.cpu_count,
        "cpu_speed": 0,
        "hardware_info": _hardware(node),
        "interface_set": interfaces,
        "boot_interface": _with_id(interfaces, node.boot_interface_id),
        "ip_addresses": [one["ip_address"] for each in interfaces for one in each["discovered"]],
        "blockdevice_set": disks,
        "physicalblockdevice_set": disks,
        "virtualblockdevice_set": [],
        "boot_disk": _with_id(disks, node.boot_disk_id),
        "storage": sum(each.size for each in node.block_devices) / _MEGABYTE,
        "storage_layout": node.storage_layout,
        "special_filesystems": [],
        "bcaches": [],
        "cache_sets": [],
        "raids": [],
        "volume_groups": [],
        "swap_size": None,
        "tag_names": list(node.tags),
        "zone": _ZONE,
        "pool": _POOL,
        "locked": False,
        "netboot": True,
        "disable_ipv4": False,
        "address_ttl": None,
        "default_gateways": {"ipv4": _NO_GATEWAY, "ipv6": _NO_GATEWAY},
        "current_commissioning_result_id": node.commissioning_set_id,
        "current_testing_result_id": node.testing_set_id,
        "current_installation_result_id": None,
        **_run("commissioning", node.commissioning),
        **_run("testing", node.testing),
        "created": wording.when(node.created.timestamp()),
        "updated": wording.when(node.updated.timestamp()),
        "resource_uri": f"{BASE}/machines/{name.system_id}/",
    }  # fmt: skip


def _interface(node: Node, interface: Interface) -> dict[str, Any]:
    system_id = node.name.system_id
    return {
        "system_id": system_id,
        "id": interface.id,
        "name": interface.name,
        "type": interface.type,
        "mac_address": interface.mac_address or "",
        "enabled": interface.enabled,
        "link_connected": interface.link_connected,
        "effective_mtu": 1500,
        "tags": [],
        "params": {},
        "parents": [],
        "children": [],
        "vlan": None,
        "links": [
            # The region has no subnets with numbers; "subnet" would have to be one.
            {"id": number, "mode": link.get("mode", ""), "subnet_cidr": link.get("subnet")}
            for number, link in enumerate(interface.links)
        ],
        "discovered": [
            {"ip_address": one.get("address", ""), "subnet_cidr": _network(one)} for one in interface.discovered
        ],
        "vendor": interface.facts.get("vendor"),
        "product": interface.facts.get("product"),
        "resource_uri": f"{BASE}/nodes/{system_id}/interfaces/{interface.id}/",
    }


def _block_device(node: Node, disk: BlockDevice) -> dict[str, Any]:
    system_id = node.name.system_id
    return {
        "system_id": system_id,
        "id": disk.id,
        "name": disk.name,
        "type": "physical",
        "path": f"/dev/disk/by-dname/{disk.name}",
        "model": disk.model,
        "serial": disk.serial,
        "id_path": disk.id_path,
        "uuid": None,
        "size": disk.size,
        "block_size": disk.block_size,
        "available_size": disk.size,
        "used_size": 0,
        "used_for": "Unused",
        "tags": list(disk.tags),
        "partition_table_type": None,
        "partitions": [],
        "filesystem": None,
        "resource_uri": f"{BASE}/nodes/{system_id}/blockdevices/{disk.id}/",
    }


def _with_id(documents: Sequence[dict[str, Any]], number: int | None) -> dict[str, Any] | None:
    return next((each for each in documents if each["id"] == number), None)


def _network(address: Any) -> str | None:
    try:
        return str(ip_interface(f"{address['address']}/{address['prefix']}").network)
    except (KeyError, ValueError):
        return None


def _hardware(node: Node) -> dict[str, str]:
    """What was found out about it in a few words; MAAS says "Unknown" of what was not."""
    found: dict[str, str] = {}
    for name in ("system", "cpu"):
        facts = node.facts.get(name)
        if isinstance(facts, dict):
            found |= {f"{name}_{key}": str(value) for key, value in facts.items() if isinstance(value, str | int)}
    return found


def _run(name: str, statuses: Sequence[ScriptStatus]) -> dict[str, Any]:
    """The status of a run as a whole; -1 where there is none, as MAAS has it."""
    status = status_of_run(statuses)
    return {
        f"{name}_status": -1 if status is None else int(status),
        f"{name}_status_name": "Empty" if status is None else status.label,
    }


def _when(moment: datetime | None) -> str | None:
    return None if moment is None else wording.when(moment.timestamp())
