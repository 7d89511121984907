"""The region's own certificate authority decides which machine is a rack, and which certificate of it is good.

A rack proves that it knows a join token's secret, bound to its TLS channel, and is given a certificate; later it is
given the next one over its link. The check of the token, its use, and the rack's rows are one transaction: a token
never counts as used for a rack that was refused.
"""

from __future__ import annotations

from datetime import UTC, datetime

from attrs import define, field, frozen

from region.authority_files import Keys
from region.database import Database, Transaction
from region.issued import IssuedCertificates
from region.racks import RackRefused, RackStore, new_system_id
from rpc.certificates import CertificateInvalid, fingerprint, issue_rack, moment
from rpc.identity import proves


class TokenRefused(Exception):
    """A rack may not enrol; the text says why and what to do. It never tells a stranger which tokens exist."""


@frozen
class EnrolledRack:
    """What a rack gets: PEM ``certificate`` and ``ca`` (every authority to trust), and its ``system_id``."""

    certificate: bytes
    ca: bytes
    system_id: str


@define
class Authority:
    """The keys at this moment (replaced by one assignment), and the tables that say who may become and stay a rack."""

    keys: Keys
    database: Database
    racks: RackStore
    issued: IssuedCertificates = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.issued = IssuedCertificates(self.database)

    async def enrol(self, binding: bytes, token_id: str, proof: bytes, request: bytes, name: str) -> EnrolledRack:
        """Make the sender of ``request`` (a PEM CSR) the rack ``name``.

        :param binding: of the TLS channel on which this was asked.
        :raises TokenRefused: if the proof does not hold, or the token has expired, is used up or was revoked.
        :raises RackRefused: if a rack has that name already.
        """
        keys = self.keys

        async def enrolling(transaction: Transaction) -> EnrolledRack:
            row = await transaction.one(
                "SELECT key, uses_left, expires, expires < now(), revoked FROM join_token WHERE id = %s FOR UPDATE",
                (token_id,),
            )
            # Nothing is said of a token to someone who has not proved to know its secret.
            if row is None or not proves(bytes(row[0]), proof, binding, request):
                raise TokenRefused(
                    "no join token of this region fits: make one with 'stanchion region join-token' and use it as it is"
                )
            _, uses_left, until, expired, revoked = row
            another = "make another with 'stanchion region join-token'"
            if revoked is not None:
                raise TokenRefused(f"the join token was revoked at {moment(revoked)}: {another}")
            if expired:
                raise TokenRefused(f"the join token expired at {moment(until)}: {another}")
            if not uses_left:
                raise TokenRefused(f"the join token was used already: {another} (--uses for more than one rack)")
            system_id = new_system_id()
            try:
                certificate = issue_rack(keys.issuing, request, system_id, datetime.now(UTC))
            except CertificateInvalid as error:
                raise TokenRefused(str(error)) from error
            await self.racks.enrol(transaction, system_id, name, fingerprint(certificate))
            # If the rack does not get to keep it, it is not a rack: it has to join again under another name.
            await self.issued.add(transaction, system_id, certificate, keys.authorities, stored=True)
            await transaction.execute("UPDATE join_token SET uses_left = uses_left - 1 WHERE id = %s", (token_id,))
            return EnrolledRack(certificate, keys.trusted, system_id)

        return await self.database.transact(enrolling)

    async def renew(self, system_id: str, request: bytes) -> EnrolledRack:
        """The next certificate of a rack that is linked now, for the key that signed ``request`` (a PEM CSR).

        :raises RackRefused: if the rack is gone or revoked, or the request is no good.
        """
        keys = self.keys

        async def renewing(transaction: Transaction) -> EnrolledRack:
            row = await transaction.one("SELECT revoked FROM rack WHERE system_id = %s FOR UPDATE", (system_id,))
            if row is None or row[0] is not None:
                raise RackRefused(f"rack {system_id} was {'forgotten' if row is None else 'revoked'}")
            try:
                certificate = issue_rack(keys.issuing, request, system_id, datetime.now(UTC))
            except CertificateInvalid as error:
                raise RackRefused(str(error)) from error
            await self.issued.add(transaction, system_id, certificate, keys.authorities, stored=False)
            return EnrolledRack(certificate, keys.trusted, system_id)

        return await self.database.transact(renewing)
