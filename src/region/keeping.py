"""How does a running region follow its key pairs, when its own certificate is renewed or its authority is changed?

The files are looked at at intervals and whenever somebody says that they changed. What is new is used for certificates
that are issued and for connections that are made from then on; connections that there are go on as they are.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Final

from twisted.internet.defer import Deferred, DeferredLock
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from region.authority import Authority
from region.authority_files import AuthorityError, Keys
from region.database import Database
from rpc.certificates import expires, moment
from rpc.identity import TLS, server_tls

log = Logger()

CHANNEL: Final = "stanchion_authority"
"""The NOTIFY channel that says that the authority's files were changed."""

LOOK_SECONDS: Final = 600.0

ENDS_SOON: Final = timedelta(days=3 * 365)
"""How long before the authority ends it is said that it must be changed: longer than a rack's certificate is good."""


class Keeper:
    """Keeps ``authority`` and the context of new connections up to date.

    :param load: reads the key pairs, and renews the region's own if need be; in a thread.
    :param tls: the context for racks' connections.
    :param looked: called after each look: there may be racks to be told which authorities to trust.
    """

    def __init__(
        self,
        clock: IReactorTime,
        now: Callable[[], datetime],
        load: Callable[[datetime], Awaitable[Keys]],
        authority: Authority,
        tls: TLS,
        looked: Callable[[], object],
    ) -> None:
        self._now = now
        self._load = load
        self._authority = authority
        self._tls = tls
        self._looked = looked
        self._order = DeferredLock()
        self._looking = LoopingCall(self.look)
        self._looking.clock = clock

    def start(self, database: Database) -> None:
        """Look from now on, at intervals and when told to."""
        end = expires(self._authority.keys.issuing.certificate)
        if end - self._now() < ENDS_SOON:
            log.warn(
                "The certificate authority ends at {end}; certificates by it are no good after that. Change it in "
                "time: stanchion region rotate-ca.",
                end=moment(end),
            )
        running = self._looking.start(LOOK_SECONDS, now=False)
        running.addErrback(lambda reason: log.failure("The authority's files are not looked at any more", reason))
        database.listen(CHANNEL, lambda payload: self.look())

    def stop(self) -> None:
        """Look no more."""
        if self._looking.running:
            self._looking.stop()

    def look(self) -> Deferred[None]:
        """Read the files and use what is new. A failure is logged, and what was in use stays in use."""
        looking: Deferred[None] = self._order.run(lambda: Deferred.fromCoroutine(self._look()))
        return looking.addErrback(lambda reason: log.failure("Could not look at the authority's files", reason))

    async def _look(self) -> None:
        before = self._authority.keys
        try:
            keys = await self._load(self._now())
        except AuthorityError as error:
            log.error(
                "The authority's files are no good, and what was read before stays in use: {reason}", reason=str(error)
            )
            return
        if keys != before:
            self._use(keys, before)
        self._looked()

    def _use(self, keys: Keys, before: Keys) -> None:
        self._tls.become(server_tls(keys.region, keys.trusted))
        self._authority.keys = keys
        if keys.region != before.region:
            log.info(
                "The region shows a new certificate to racks that connect from now on; it ends at {end}.",
                end=moment(expires(keys.region.certificate)),
            )
        if keys.authorities != before.authorities:
            log.warn(
                "The region's authorities have changed; trusted are now {authorities}. Racks are asked to renew.",
                authorities=", ".join(sha256[:16] for sha256 in keys.authorities),
            )


async def tell(database: Database) -> None:
    """Have every region process look at the authority's files now."""
    await database.execute("SELECT pg_notify(%s, '')", (CHANNEL,))
