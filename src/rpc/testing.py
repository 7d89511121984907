"""How a test gets two ends of a link that meet in memory, with time under its control.

The wire is the real one, box by box; TLS is left out, so each end is told who the other is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attrs import define, field
from twisted.internet.task import Clock
from twisted.test.iosim import FakeTransport, IOPump, connect
from zope.interface import implementer

from rpc.commands import PROTOCOL_VERSION, Command, Role
from rpc.identity import Peer
from rpc.protocol import Link, Responders
from rpc.reporting import FailedCall, IReporter
from rpc.responders import Responder

REGION: Final = Peer("region", "", "192.0.2.1:5250")
RACK: Final = Peer("rack", "abc234", "192.0.2.2:40000")
ANONYMOUS: Final = Peer("anonymous", "", "192.0.2.3:40000")

BINDING: Final = b"the binding of a channel in test"
"""What both ends have for :meth:`rpc.protocol.Link.channel_binding`."""

Table = Responders | Mapping[type[Command], Responder]


@implementer(IReporter)
@define
class RecordingReporter:
    """Keeps every failed call that it is told of."""

    calls: list[FailedCall] = field(factory=list)

    def failed(self, call: FailedCall) -> None:
        """Keep ``call``."""
        self.calls.append(call)

    @property
    def kinds(self) -> list[str]:
        """The kinds of the failed calls, in order."""
        return [call.kind for call in self.calls]


def linked(
    region_responders: Table,
    rack_responders: Table,
    clock: Clock | None = None,
    *,
    rack: Peer = RACK,
    region: Peer = REGION,
    region_reporter: IReporter | None = None,
    rack_reporter: IReporter | None = None,
    version: int | None = PROTOCOL_VERSION,
    **settings: Any,
) -> tuple[Link, Link, IOPump]:
    """A link in memory: its region end, its rack end, and the pump whose ``flush()`` carries what was written.

    :param region_responders: what the region answers: a table, or :class:`~rpc.protocol.Responders`.
    :param rack_responders: what the rack answers.
    :param clock: the time of both ends; a fresh one by default (it is ``pump.clock``).
    :param rack: who the region takes the other end for; ``ANONYMOUS`` for one that enrols.
    :param version: what both agreed on when the rack registered; None if it has not registered yet.
    :param settings: ``interval`` and ``patience`` of :class:`~rpc.protocol.Link`.
    """
    time = clock if clock is not None else Clock()
    rack_role: Role = rack.role
    region_end = Link(
        _responders("region", region_responders),
        clock=time, peer=rack, binding=BINDING, reporter=region_reporter, **settings,
    )  # fmt: skip
    rack_end = Link(
        _responders(rack_role, rack_responders),
        clock=time, peer=region, binding=BINDING, reporter=rack_reporter, **settings,
    )  # fmt: skip
    if version is not None and rack_role == "rack":
        region_end.agreed(version)
        rack_end.agreed(version)
    pump = connect(
        region_end, FakeTransport(region_end, isServer=True), rack_end, FakeTransport(rack_end, isServer=False),
        clock=time,
    )  # fmt: skip
    return region_end, rack_end, pump


def _responders(role: Role, table: Table) -> Responders:
    return table if isinstance(table, Responders) else Responders(role, table)
