"""What one peer may cost the other end: calls, bytes that it does not read, connections that show no certificate.

A peer that goes beyond is refused or cut off, and nobody else notices. The bounds of a box are in :mod:`rpc.boxes`,
those of a value in :mod:`rpc.arguments`.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from rpc.arguments import KIB, MIB
from rpc.commands import Role

if TYPE_CHECKING:
    from twisted.internet.interfaces import IDelayedCall

    from rpc.protocol import Link

MAX_CALLS: Final = 128
"""Calls of this end's that may be under way on one link; one more is not sent."""

MAX_ANSWERING: Final = 128
"""Asks of one link that are answered at a time; one more is refused."""

MAX_ANONYMOUS_ANSWERING: Final = 2
"""The same for a peer that has not shown who it is: it has one thing to ask."""

MAX_REFUSED: Final = 128
"""Asks in a row that are refused because so many are being answered; who asks on after that is cut off."""

MAX_ANONYMOUS_REFUSED: Final = 8
"""Asks of a peer that has not shown who it is that are refused, for whatever reason; then it is cut off."""

TURN_SECONDS: Final = 0.02
"""How long this end is busy with what one peer has sent before it looks after the others."""

REGISTER_SECONDS: Final = 90.0
"""How long a rack may have a link with the region without registering on it."""

MAX_UNREAD: Final = 16 * MIB
"""Bytes that wait for a peer that does not read them; more than the largest box."""

MAX_ANONYMOUS_UNREAD: Final = 256 * KIB
"""The same for a peer that has not shown who it is."""

MAX_STRANGERS: Final = 1024
"""Connections that have shown no certificate, or not yet: a thousand racks that come back at once fit. How long each
may take is in :mod:`rpc.connection`."""

MAX_LINKS: Final = 4
"""Links that one rack may have with one process. One is what it needs; the others are those that it has lost, perhaps
without a word."""


def answering(role: Role) -> int:
    """How many asks of a peer of this role are answered at a time."""
    return MAX_ANONYMOUS_ANSWERING if role == "anonymous" else MAX_ANSWERING


def unread(role: Role) -> int:
    """How many bytes may wait for a peer of this role."""
    return MAX_ANONYMOUS_UNREAD if role == "anonymous" else MAX_UNREAD


class Door:
    """Bounds the connections that come in.

    When one is too many, an older one is cut: of the strangers the oldest from the address that has the most. So who
    knocks and says nothing loses its own connections, and one that is about to show its certificate is hardly ever
    among them.
    """

    def __init__(self, strangers: int = MAX_STRANGERS, links: int = MAX_LINKS) -> None:
        self._most_strangers = strangers
        self._most_links = links
        self._strangers: dict[Link, str] = {}
        self._links: dict[tuple[Role, str], list[Link]] = {}
        self._unregistered: dict[Link, IDelayedCall] = {}

    @property
    def strangers(self) -> int:
        """How many connections have shown no certificate."""
        return len(self._strangers)

    def enter(self, link: Link, host: str) -> None:
        """Take note of ``link``, which is about to be made with a peer at ``host``."""
        if len(self._strangers) >= self._most_strangers:
            [(busiest, count)] = Counter(self._strangers.values()).most_common(1)
            oldest = next(each for each, host in self._strangers.items() if host == busiest)
            del self._strangers[oldest]
            oldest.abort(
                f"{self._most_strangers} connections have shown no certificate, {count} of them from {busiest}: this "
                "was the oldest of those"
            )
        self._strangers[link] = host
        link.on_ready(self._known)
        link.on_lost(self._left)

    def _known(self, link: Link) -> None:
        if link.peer.role == "anonymous":
            return
        self._strangers.pop(link, None)
        self._unregistered[link] = link.clock.callLater(REGISTER_SECONDS, self._too_late, link)
        links = self._links.setdefault((link.peer.role, link.peer.id), [])
        links.append(link)
        if len(links) > self._most_links:
            # Not the one that it registered on: whoever has a copy of its certificate could cut that off otherwise.
            spare = next((each for each in links if not each.registered), links[0])
            links.remove(spare)
            spare.cut(
                "links", f"{link.peer} has more than {self._most_links} links, and this is its oldest without use"
            )

    def _too_late(self, link: Link) -> None:
        del self._unregistered[link]
        if not link.registered:
            link.cut("unregistered", f"it has not registered within {REGISTER_SECONDS:g} s")

    def _left(self, link: Link, reason: str) -> None:
        self._strangers.pop(link, None)
        timer = self._unregistered.pop(link, None)
        if timer is not None:
            timer.cancel()
        key = (link.peer.role, link.peer.id)
        links = self._links.get(key, [])
        if link in links:
            links.remove(link)
            if not links:
                del self._links[key]
