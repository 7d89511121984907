"""How does a rack get its next certificate, years before anybody would think of it?

When a quarter of the certificate's life is left, or when the region asks for it, the rack makes a fresh key, has the
region certify it over a link that is up, stores the whole identity in one rename, and tells the region that it has. The
links stay as they are; the next connection shows the new certificate. Until then both are good at the region, so the
rack may be cut off at any point.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from attrs import evolve
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import LoopingCall
from twisted.logger import Logger
from twisted.python.failure import Failure

from rack.identity import Identity, write_identity
from rpc.certificates import (
    CertificateInvalid,
    check_issued,
    fingerprint,
    load_certificate,
    make_request,
    moment,
    new_key,
)
from rpc.commands import Renew, RenewalRefused, Renewed
from rpc.events import plain
from rpc.failures import CallFailed
from rpc.fetch import RunInThread
from rpc.identity import TLS, client_tls
from rpc.protocol import Link

log = Logger()

LOOK_SECONDS: Final = 60.0
"""How often it is looked whether it is time."""

DUE: Final = 0.25
"""The part of a certificate's life that is left when it is renewed."""

SPREAD_SECONDS: Final = 30.0
"""Racks that a region asks all at once take at most so long to come."""

MAX_REASON: Final = 256
"""Characters of a region's reason that are shown."""

FIRST_PAUSE_SECONDS: Final = 60.0
LONGEST_PAUSE_SECONDS: Final = 3600.0


class Renewal:
    """Renews ``identity``, which is the one in use, in ``directory``.

    :param clock: for waiting; ``now`` tells the time, for certificates.
    :param jitter: gives a number from 0 to 1.
    """

    def __init__(
        self,
        identity: Identity,
        directory: Path,
        clock: IReactorTime,
        now: Callable[[], datetime],
        run_in_thread: RunInThread,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.identity = identity
        self._directory = directory
        self._clock = clock
        self._now = now
        self._run_in_thread = run_in_thread
        self._jitter = jitter
        self._contexts: list[TLS] = []
        self._links: list[Link] = []
        self._asked = ""
        self._failures = 0
        self._not_before = 0.0
        self._renewing: Deferred[None] | None = None
        self._waking: IDelayedCall | None = None
        self._looking = LoopingCall(self.look)
        self._looking.clock = clock

    def follow(self, tls: TLS) -> None:
        """Have ``tls``, which shows the present certificate, show each next one."""
        self._contexts.append(tls)

    def start(self) -> None:
        """Look at intervals whether it is time."""
        running = self._looking.start(LOOK_SECONDS, now=False)
        running.addErrback(lambda reason: log.failure("The certificate is not renewed any more", reason))

    async def stop(self) -> None:
        """End, also in the midst of a renewal."""
        if self._looking.running:
            self._looking.stop()
        if self._waking is not None and self._waking.active():
            self._waking.cancel()
        if self._renewing is not None:
            self._renewing.cancel()

    def linked(self, link: Link) -> None:
        """``link`` is registered: the certificate can be renewed over it."""
        self._links.append(link)
        link.on_lost(lambda link, reason: self._links.remove(link))
        self.look()

    async def renew_soon(self, link: Link, reason: str) -> Mapping[str, Any]:
        """The region asks for it. All racks may be asked at once, so each waits a little."""
        if not self._asked:
            self._asked = " ".join(plain(reason, MAX_REASON).split()) or "it does not say why"
            log.info("{peer} asks for a new certificate: {reason}", peer=str(link.peer), reason=self._asked)
            self._failures = 0
            self._not_before = self._clock.seconds() + self._jitter() * SPREAD_SECONDS
            self._waking = self._clock.callLater(self._not_before - self._clock.seconds(), self.look)
        return {}

    def look(self) -> None:
        """Renew if it is time, if a link is up, and if that is not under way."""
        if self._renewing is not None or not self._links or self._clock.seconds() < self._not_before:
            return
        why = self._asked or self._is_due()
        if why:
            # After a failure another link may do, if there is one.
            link = self._links[self._failures % len(self._links)]
            log.info("Renewing the rack's certificate over the link with {peer}: {why}", peer=str(link.peer), why=why)
            renewing = self._renewing = Deferred.fromCoroutine(self._renew(link))
            renewing.addCallbacks(self._succeeded, self._failed)

    def _is_due(self) -> str:
        certificate = load_certificate(self.identity.credentials.certificate)
        begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        return f"it ends at {moment(end)}" if end - self._now() < (end - begin) * DUE else ""

    async def _renew(self, link: Link) -> None:
        key = new_key()
        answer = await link.call(Renew, csr=make_request(key))
        identity = self._checked(key, answer["certificate"], answer["ca"])
        tls = client_tls(identity.credentials, identity.authority)
        await self._run_in_thread(write_identity, self._directory, identity)
        # From here on a restart uses the new one, and so does the next connection.
        self.identity = identity
        for context in self._contexts:
            context.become(tls)
        log.info(
            "The rack's new certificate is stored; it ends at {end}.",
            end=moment(load_certificate(answer["certificate"]).not_valid_after_utc),
        )
        # If the region does not hear of it, it sees it when the rack connects the next time.
        await link.ask(Renewed, certificate=fingerprint(answer["certificate"]))

    def _checked(self, key: bytes, certificate: bytes, ca: bytes) -> Identity:
        system_id = check_issued(certificate, key, ca)
        if system_id != self.identity.system_id:
            raise CertificateInvalid(f"the certificate is for rack {system_id}, not for {self.identity.system_id}")
        end = load_certificate(certificate).not_valid_after_utc
        if end <= self._now():
            raise CertificateInvalid(
                f"the certificate ended at {moment(end)}, and the clock here says {moment(self._now())}: compare the "
                "clocks of both machines"
            )
        return evolve(
            self.identity, key=key.decode("ascii"), certificate=certificate.decode("ascii"), ca=ca.decode("ascii")
        )

    def _succeeded(self, _: None) -> None:
        self._renewing = None
        self._asked = ""
        self._failures = 0
        if why := self._is_due():
            # Otherwise this would go on as fast as it can, with a certificate and a key at each turn.
            self._not_before = self._clock.seconds() + LONGEST_PAUSE_SECONDS
            log.error(
                "The rack's new certificate is due already: {why}, and the clock here says {now}. Compare the clocks "
                "of both machines. It is renewed again in {minutes:g} minutes.",
                why=why, now=moment(self._now()), minutes=LONGEST_PAUSE_SECONDS / 60,
            )  # fmt: skip

    def _failed(self, reason: Failure) -> None:
        self._renewing = None
        if reason.check(CancelledError):
            return
        longest = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(self._failures, 16))
        pause = longest * (1.0 - self._jitter() / 2)
        self._failures += 1
        self._not_before = self._clock.seconds() + pause
        end = moment(load_certificate(self.identity.credentials.certificate).not_valid_after_utc)
        if not reason.check(CallFailed, RenewalRefused, CertificateInvalid, OSError):
            log.failure("Renewing the rack's certificate failed, on an error of its own", reason)
        log.error(
            "The rack's certificate could not be renewed: {reason}. It is tried again in {pause:.0f} s; the present "
            "one ends at {end}.",
            reason=str(reason.value) or type(reason.value).__name__, pause=pause, end=end,
        )  # fmt: skip
