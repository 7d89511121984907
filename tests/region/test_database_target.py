"""Connection strings: which hosts are looked up, and what libpq is then given."""

from __future__ import annotations

from typing import Any

from twisted.internet.address import IPv4Address, IPv6Address
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from region.database.target import NameNotFound, Target


class FakeResolver:
    """A reactor whose resolver knows ``names``."""

    def __init__(self, **names: list[str]) -> None:
        self._names = {name.replace("_", "."): addresses for name, addresses in names.items()}
        self.nameResolver = self

    def resolveHostName(self, receiver: Any, name: str) -> None:
        for address in self._names[name]:
            kind = IPv6Address if ":" in address else IPv4Address
            receiver.addressResolved(kind("TCP", address, 0))
        receiver.resolutionComplete()


class TargetTests(SynchronousTestCase):
    def resolved(self, dsn: str, **names: list[str]) -> dict[str, str]:
        reactor: Any = FakeResolver(**names)
        return self.successResultOf(Deferred.fromCoroutine(Target.parse(dsn).resolved(reactor)))

    def test_a_socket_and_an_address_need_no_look_up(self) -> None:
        for host in ("/run/postgresql", "@abstract", "10.0.0.1", "::1", "fe80::1%eth0"):
            self.assertEqual(Target.parse(f"host={host} dbname=x").names(), [])

    def test_a_name_keeps_its_name_for_tls_and_gets_all_its_addresses(self) -> None:
        found = self.resolved("postgresql://u:p@db.example:5433/x", db_example=["10.0.0.1", "::2"])
        self.assertEqual(found["host"], "db.example,db.example")
        self.assertEqual(found["hostaddr"], "10.0.0.1,::2")
        self.assertEqual(found["port"], "5433,5433")

    def test_several_hosts_keep_their_order_and_ports(self) -> None:
        found = self.resolved("host=a.x,10.0.0.9,/run/pg port=1,2,3", a_x=["10.0.0.1", "10.0.0.2"])
        self.assertEqual(found["host"], "a.x,a.x,10.0.0.9,/run/pg")
        self.assertEqual(found["hostaddr"], "10.0.0.1,10.0.0.2,10.0.0.9,")
        self.assertEqual(found["port"], "1,1,2,3")

    def test_a_given_address_is_used_as_it_is(self) -> None:
        self.assertEqual(self.resolved("host=db.example hostaddr=10.0.0.7")["hostaddr"], "10.0.0.7")

    def test_a_name_without_addresses_is_an_error(self) -> None:
        reactor: Any = FakeResolver(db_example=[])
        target = Target.parse("host=db.example")
        failure = self.failureResultOf(Deferred.fromCoroutine(target.resolved(reactor)), NameNotFound)
        self.assertIn("db.example", failure.getErrorMessage())

    def test_the_description_has_no_password(self) -> None:
        target = Target.parse("postgresql://me:s3cret@db.example:5433/images")
        self.assertEqual(target.description, "PostgreSQL database 'images' at db.example port 5433")

    def test_what_the_operator_sets_wins_over_our_defaults(self) -> None:
        parameters = Target.parse("host=h keepalives_idle=7 application_name=mine").parameters
        self.assertEqual((parameters["keepalives_idle"], parameters["application_name"]), ("7", "mine"))
