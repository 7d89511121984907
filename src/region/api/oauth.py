"""Who a request comes from: the OAuth 1.0 PLAINTEXT header (RFC 5849) checked, with oauthlib, against the API keys.

A key that was found good is remembered for :data:`LIFETIME` seconds, so that a request costs no query. A revoked key
is refused at once by every region process that hears the notification, and after :data:`LIFETIME` seconds by one that
does not. With PLAINTEXT the secret itself is in the header, so timestamp and nonce prove nothing and are not looked at.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final, Protocol

from attrs import frozen
from oauthlib.oauth1.rfc5849 import signature
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from region.api.keys import ApiKey

log = Logger()

LIFETIME: Final = 5.0
"""Seconds that a key is remembered, from when it was looked up; so long may a revoked one live, and no longer."""

REMEMBERED: Final = 1024
"""How many keys are remembered at most."""

_MAX_PART: Final = 256


class Unauthorized(Exception):
    """The request does not prove that it comes from someone with a key; the text says why."""


class Keys(Protocol):
    """The part of :class:`region.api.keys.ApiKeyStore` that is needed here."""

    async def find(self, consumer_key: str, token_key: str) -> ApiKey | None:
        """The key with these first two parts."""


@frozen
class Claim:
    """What an Authorization header says: who it is from, and the ``signature`` that has to prove it."""

    consumer: str
    token: str
    signature: str

    @property
    def is_plausible(self) -> bool:
        """Whether anybody can have these keys."""
        return max(len(self.consumer), len(self.token)) <= _MAX_PART and "\x00" not in self.consumer + self.token

    def proves(self, secret: str | None) -> bool:
        """Whether it was signed with the token secret ``secret`` (and no consumer secret).

        To be asked with None where there is no such token: so the time taken does not tell which tokens exist.
        """
        matches: bool = signature.verify_plaintext(self, "", secret or "-")
        return matches and secret is not None


def read_claim(header: str | None) -> Claim:
    """What the Authorization header ``header`` says.

    :raises Unauthorized: if there is none, or it is not one of OAuth 1.0 with PLAINTEXT.
    """
    if not header:
        raise Unauthorized("No Authorization header: sign the request with an API key (OAuth 1.0, PLAINTEXT).")
    try:
        found: list[tuple[str, str]] = signature.collect_parameters(
            headers={"Authorization": header}, exclude_oauth_signature=False
        )
    except ValueError:
        raise Unauthorized("The Authorization header is not one of OAuth 1.0.") from None
    values = dict(found)
    if len(values) != len(found):
        raise Unauthorized("The Authorization header has a parameter twice.")
    method = values.get("oauth_signature_method", "")
    if method != "PLAINTEXT":
        raise Unauthorized(f"The signature method is {method[:40]!r}; only PLAINTEXT is supported.")
    consumer, token = values.get("oauth_consumer_key", ""), values.get("oauth_token", "")
    if not consumer or not token:
        raise Unauthorized("The Authorization header lacks oauth_consumer_key or oauth_token.")
    return Claim(consumer, token, values.get("oauth_signature", ""))


class Authenticator:
    """Checks Authorization headers. :meth:`forget` must be called whenever a key was revoked, or may have been."""

    def __init__(self, keys: Keys, clock: IReactorTime) -> None:
        self._keys = keys
        self._clock = clock
        self._known: OrderedDict[tuple[str, str], tuple[ApiKey, float]] = OrderedDict()
        self._looking: dict[tuple[str, str], list[Deferred[ApiKey | None]]] = {}
        self._forgotten = 0

    def forget(self, payload: str = "") -> None:
        """Forget every key that is remembered."""
        self._known.clear()
        self._forgotten += 1

    async def authenticate(self, header: str | None) -> ApiKey:
        """The key that the Authorization header ``header`` proves.

        :raises Unauthorized: if it proves none.
        :raises DatabaseUnavailable: if the key is not remembered and the database cannot be asked.
        """
        claim = read_claim(header)
        key = await self._find(claim.consumer, claim.token) if claim.is_plausible else None
        if not claim.proves(key.token_secret if key else None) or key is None:
            raise Unauthorized("Invalid API key: it is unknown, was revoked, or its secret is wrong.")
        return key

    async def _find(self, consumer: str, token: str) -> ApiKey | None:
        name = (consumer, token)
        now = self._clock.seconds()
        if name in self._known:
            key, expires = self._known[name]
            if now < expires:
                return key
            del self._known[name]
        mine: Deferred[ApiKey | None] = Deferred(lambda waiting: self._looking[name].remove(waiting))
        if name in self._looking:
            self._looking[name].append(mine)
        else:
            # Clients that come together share one query, and one that leaves does not take it from the others.
            self._looking[name] = [mine]
            Deferred.fromCoroutine(self._keys.find(consumer, token)).addBoth(
                self._found, name, now + LIFETIME, self._forgotten
            )
        return await mine

    def _found(self, result: Any, name: tuple[str, str], expires: float, forgotten: int) -> None:
        # A key that may have been revoked since the query began is good for those who wait, and no longer.
        if isinstance(result, ApiKey) and forgotten == self._forgotten:
            self._known[name] = (result, expires)
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        waiting = self._looking.pop(name)
        if not waiting and isinstance(result, Failure):
            log.failure("An API key could not be looked up, and nobody waits for it any more", result)
        while waiting:
            waiting.pop(0).callback(result)
