"""Which PostgreSQL server does a connection string mean, and how is it reached without blocking the reactor?

libpq looks host names up with a blocking call even on an asynchronous connection, so names are looked up here, with
the reactor's resolver, and libpq is given the addresses next to the names (which TLS still verifies).
"""

from __future__ import annotations

import os
from ipaddress import ip_address
from typing import Any

import psycopg2
from attrs import frozen
from psycopg2.extensions import parse_dsn
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IAddress, IHostResolution, IReactorPluggableNameResolver, IResolutionReceiver
from zope.interface import provider

# A server that vanished without a word (power, network) is noticed after about a minute.
_KEEPALIVE = {
    "keepalives": "1",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}


class NameNotFound(Exception):
    """A host name of the connection string has no address."""


@frozen
class Target:
    """One PostgreSQL database. ``parameters`` are libpq's, including the password; ``description`` never has it."""

    parameters: dict[str, str]
    description: str

    @classmethod
    def parse(cls, dsn: str) -> Target:
        """Read a libpq connection string or URL. Raises ``ValueError``, which quotes nothing of it."""
        try:
            given: dict[str, Any] = parse_dsn(dsn)
        except psycopg2.Error:
            # libpq's own message may quote any part of the string, so also the password.
            raise ValueError(
                "the database setting is not a PostgreSQL connection string: write"
                " postgresql://user:password@host:port/name (with special characters percent-encoded),"
                " or leave it empty to use the embedded server"
            ) from None
        parameters = {**_KEEPALIVE, "application_name": "stanchion", **{k: str(v) for k, v in given.items()}}
        parameters["client_encoding"] = "UTF8"
        return cls(parameters, _describe(parameters))

    def names(self) -> list[str]:
        """The host names that must be looked up before libpq may have the parameters."""
        return [] if "hostaddr" in self.parameters else [host for host in self._hosts() if _is_name(host)]

    async def resolved(self, reactor: IReactorPluggableNameResolver) -> dict[str, str]:
        """libpq's parameters with every host name's addresses filled in. Raises :class:`NameNotFound`."""
        if not self.names():
            return self.parameters
        hosts, ports = self._hosts(), self.parameters.get("port", "").split(",")
        if len(ports) == 1:
            ports = ports * len(hosts)
        found: list[tuple[str, str, str]] = []
        for host, port in zip(hosts, ports, strict=False):
            if not _is_name(host):
                found.append((host, "" if _is_socket(host) else host, port))
                continue
            addresses = await _look_up(reactor, host)
            if not addresses:
                raise NameNotFound(f"the host name {host!r} has no address")
            found += [(host, address, port) for address in addresses]
        result = dict(self.parameters)
        result["host"], result["hostaddr"], ports_text = (",".join(column) for column in zip(*found, strict=True))
        if ports_text.strip(","):
            result["port"] = ports_text
        return result

    def _hosts(self) -> list[str]:
        return (self.parameters.get("host") or os.environ.get("PGHOST", "")).split(",")


def _describe(parameters: dict[str, str]) -> str:
    host = parameters.get("host") or parameters.get("hostaddr") or os.environ.get("PGHOST", "") or "the local socket"
    port = parameters.get("port")
    database = parameters.get("dbname") or parameters.get("user") or "(default)"
    return f"PostgreSQL database {database!r} at {host}{f' port {port}' if port else ''}"


def _is_socket(host: str) -> bool:
    return host.startswith(("/", "@"))


def _is_name(host: str) -> bool:
    if not host or _is_socket(host):
        return False
    try:
        ip_address(host.partition("%")[0])
    except ValueError:
        return True
    return False


def _look_up(reactor: IReactorPluggableNameResolver, name: str) -> Deferred[list[str]]:
    done: Deferred[list[str]] = Deferred()
    addresses: list[str] = []

    @provider(IResolutionReceiver)
    class Receiver:
        @staticmethod
        def resolutionBegan(resolution: IHostResolution) -> None:
            """Nothing to keep: a look-up that takes too long is abandoned, not stopped."""

        @staticmethod
        def addressResolved(address: IAddress) -> None:
            host = getattr(address, "host", None)
            if isinstance(host, str) and host not in addresses:
                addresses.append(host)

        @staticmethod
        def resolutionComplete() -> None:
            if not done.called:
                done.callback(addresses)

    reactor.nameResolver.resolveHostName(Receiver, name)  # type: ignore[arg-type]  # zope: the class provides it
    return done
