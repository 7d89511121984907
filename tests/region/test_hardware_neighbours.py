"""Which neighbours lldpd's document tells of."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from region.hardware.neighbours import MAX_LISTED, MAX_NEIGHBOURS, Neighbour, Neighbours, Vlan, read_neighbours
from region.hardware.outputs import HookError

DOCUMENT = """<?xml version="1.0" encoding="UTF-8"?>
<lldp label="LLDP neighbors">
 <interface label="Interface" name="eno1" via="LLDP" rid="1" age="0 day, 00:00:04">
  <chassis label="Chassis">
   <id label="ChassisID" type="mac">6e:e1:03:d4:1e:ec</id>
   <name label="SysName">leaf-1</name>
   <descr label="SysDescr">Switch &lt;OS&gt;
 release 4</descr>
   <mgmt-ip label="MgmtIP">192.0.2.9</mgmt-ip>
   <mgmt-ip label="MgmtIP">fe80::1</mgmt-ip>
   <capability label="Capability" type="Bridge" enabled="on"/>
  </chassis>
  <port label="Port">
   <id label="PortID" type="ifname">Ethernet1/7</id>
   <descr label="PortDescr">rack 4</descr>
   <auto-negotiation supported="no" enabled="no"><current label="MAU oper type">10G</current></auto-negotiation>
  </port>
  <vlan label="VLAN" vlan-id="10" pvid="yes">provision</vlan>
  <vlan label="VLAN" vlan-id="20">storage</vlan>
 </interface>
 <interface label="Interface" name="eno2" via="CDPv2"><chassis><name>other</name></chassis><port/></interface>
</lldp>
"""


def read(document: str) -> Neighbours:
    return read_neighbours({"stdout": document.encode()})


class NeighbourTests(SynchronousTestCase):
    def test_the_switch_and_its_port_are_found(self) -> None:
        first = Neighbour(
            "eno1", "LLDP", "6e:e1:03:d4:1e:ec", "leaf-1", "Switch <OS>\ufffd release 4", ("192.0.2.9", "fe80::1"),
            "Ethernet1/7", "rack 4", (Vlan("10", "provision", untagged=True), Vlan("20", "storage", untagged=False)),
        )  # fmt: skip
        self.assertEqual(read(DOCUMENT), Neighbours((first, Neighbour("eno2", "CDPv2", chassis_name="other"))))

    def test_no_neighbours_are_no_error(self) -> None:
        for document in ('<lldp label="LLDP neighbors"/>', "<lldp></lldp>", '<?xml version="1.0"?>\n<lldp/>\n'):
            self.assertEqual(read(document), Neighbours(()))

    def test_what_is_missing_of_a_neighbour_is_empty(self) -> None:
        self.assertEqual(read("<lldp><interface name='a'><vlan/></interface></lldp>").found[0].vlans[0].id, "")
        self.assertEqual(read("<lldp><interface/></lldp>").found, ())

    def test_another_document_is_refused(self) -> None:
        for document in ("<html/>", DOCUMENT[:-20], "no neighbours", "<lldp><!DOCTYPE a></lldp>"):
            with self.assertRaises(HookError):
                read(document)

    def test_neighbours_without_end_are_counted(self) -> None:
        found = read("<lldp>" + "<interface name='a'/>" * (MAX_NEIGHBOURS + 5) + "</lldp>")
        self.assertEqual((len(found.found), found.omitted), (MAX_NEIGHBOURS, 5))
        vlans = "<vlan vlan-id='1'>a</vlan>" * (MAX_LISTED + 5)
        self.assertEqual(len(read(f"<lldp><interface name='a'>{vlans}</interface></lldp>").found[0].vlans), MAX_LISTED)
