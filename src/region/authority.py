"""The region's own certificate authority: made at first start, it decides which machine is a rack.

A rack proves that it knows a join token's secret, bound to its TLS channel, and is given a certificate. The check of
the token, its use, and the rack's row are one transaction: a token never counts as used for a rack that was refused.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from attrs import frozen
from cryptography.exceptions import InvalidSignature

from region.database import Database, Transaction
from region.racks import RackStore, new_system_id
from rpc.certificates import (
    CertificateInvalid,
    Credentials,
    create_authority,
    expires,
    fingerprint,
    issue_rack,
    issue_region,
    load_certificate,
    load_credentials,
    write_private,
)
from rpc.identity import JoinToken, proves

TOKEN_SECONDS: Final = 24 * 3600
"""How long a join token is good for, unless it was made otherwise."""

RENEW_BEFORE: Final = timedelta(days=90)
"""How long before the region's own certificate ends a start of the region replaces it."""


class AuthorityError(Exception):
    """The authority's files cannot be read, written or used; the text says which and what to do."""


class TokenRefused(Exception):
    """A rack may not enrol; the text says why and what to do. It never tells a stranger which tokens exist."""


@frozen
class EnrolledRack:
    """What a rack gets: PEM ``certificate`` and ``ca``, and its ``system_id``."""

    certificate: bytes
    ca: bytes
    system_id: str


@frozen
class Authority:
    """The authority's key pair, the region's own, and the tables that say who may become a rack."""

    credentials: Credentials
    region: Credentials
    database: Database
    racks: RackStore

    @property
    def ca(self) -> bytes:
        """The authority's certificate, PEM."""
        return self.credentials.certificate

    async def enrol(self, binding: bytes, token_id: str, proof: bytes, request: bytes, name: str) -> EnrolledRack:
        """Make the sender of ``request`` (a PEM CSR) the rack ``name``.

        :param binding: of the TLS channel on which this was asked.
        :raises TokenRefused: if the proof does not hold, or the token has expired or is used up.
        :raises RackRefused: if a rack has that name already.
        """

        async def enrolling(transaction: Transaction) -> EnrolledRack:
            row = await transaction.one(
                "SELECT key, uses_left, expires, expires < now() FROM join_token WHERE id = %s FOR UPDATE", (token_id,)
            )
            # Nothing is said of a token to someone who has not proved to know its secret.
            if row is None or not proves(bytes(row[0]), proof, binding, request):
                raise TokenRefused(
                    "no join token of this region fits: make one with 'stanchion region join-token' and use it as it is"
                )
            _, uses_left, until, expired = row
            if expired:
                raise TokenRefused(
                    f"the join token expired at {until:%Y-%m-%d %H:%M:%S} UTC: make another with "
                    "'stanchion region join-token'"
                )
            if not uses_left:
                raise TokenRefused(
                    "the join token was used already: make another with 'stanchion region join-token' (--uses for more "
                    "than one rack)"
                )
            system_id = new_system_id()
            try:
                certificate = issue_rack(self.credentials, request, system_id, datetime.now(UTC))
            except CertificateInvalid as error:
                raise TokenRefused(str(error)) from error
            await self.racks.enrol(transaction, system_id, name, fingerprint(certificate))
            await transaction.execute("UPDATE join_token SET uses_left = uses_left - 1 WHERE id = %s", (token_id,))
            return EnrolledRack(certificate, self.ca, system_id)

        return await self.database.transact(enrolling)


def load_authority(directory: Path, name: str, now: datetime) -> tuple[Credentials, Credentials]:
    """The authority's credentials and the region's, from ``directory``; made there if they are not yet. Blocks.

    The authority's are never replaced, because every rack has that certificate pinned. The region's are made anew
    when they end soon or were issued by another authority.

    :raises AuthorityError: if a file is missing, unreadable, not what it must be, or cannot be written.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.chmod(0o700)
        if not (directory / "ca.crt").exists() and (directory / "region.key").exists():
            # Made in this order, so this is no interrupted first start: a new authority would lock every rack out.
            raise AuthorityError(
                f"{directory / 'ca.crt'} is missing: restore it from a backup, or move {directory} away and join every "
                "rack again"
            )
        authority = _pair(directory, "ca") or _make(directory, "ca", create_authority(now, f"Stanchion {name}"))
        region = _pair(directory, "region")
        if region is None or expires(region.certificate) - now < RENEW_BEFORE or not _issued(region, authority):
            region = _make(directory, "region", issue_region(authority, now, name))
    except OSError as error:
        raise AuthorityError(f"{error.filename or directory}: {error.strerror}") from error
    except CertificateInvalid as error:
        raise AuthorityError(f"{directory}: {error}; restore the files from a backup") from error
    if expires(authority.certificate) <= now:
        raise AuthorityError(
            f"{directory / 'ca.crt'} expired at {expires(authority.certificate):%Y-%m-%d}: move the directory away, "
            "start the region, and join every rack again"
        )
    return authority, region


def _pair(directory: Path, stem: str) -> Credentials | None:
    key, certificate = directory / f"{stem}.key", directory / f"{stem}.crt"
    if not certificate.exists():
        # The certificate is written last, so a key without one is what an interrupted first start left.
        return None
    if not key.exists():
        raise AuthorityError(
            f"{key} is missing but {certificate} is there: restore it from a backup, or move {directory} away and join "
            "every rack again"
        )
    credentials = Credentials(key.read_bytes(), certificate.read_bytes())
    load_credentials(credentials)
    return credentials


def _make(directory: Path, stem: str, credentials: Credentials) -> Credentials:
    # Renewing: were the pair replaced file by file, a crash between them would leave two that do not belong together.
    (directory / f"{stem}.crt").unlink(missing_ok=True)
    write_private(directory / f"{stem}.key", credentials.key)
    write_private(directory / f"{stem}.crt", credentials.certificate)
    return credentials


def _issued(region: Credentials, authority: Credentials) -> bool:
    try:
        load_certificate(region.certificate).verify_directly_issued_by(load_certificate(authority.certificate))
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def read_ca(directory: Path) -> bytes:
    """The authority's certificate, PEM, of a region that was started once. Blocks.

    :raises AuthorityError: if there is none, or it cannot be read.
    """
    path = directory / "ca.crt"
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise AuthorityError(f"{path} is not there: start the region once, which makes it") from None
    except OSError as error:
        raise AuthorityError(f"{path}: {error.strerror} (uid {os.geteuid()}); run this as the region's user") from error


async def create_join_token(
    database: Database, ca: bytes, *, expires_seconds: float = TOKEN_SECONDS, uses: int = 1
) -> str:
    """The text of a new join token for the authority whose certificate is ``ca`` (PEM).

    Only the sha256 of its secret is stored. Tokens that expired a month ago are forgotten.

    :param expires_seconds: from now.
    :param uses: how many racks may join with it.
    """
    token = JoinToken.create(ca)

    async def write(transaction: Transaction) -> None:
        await transaction.execute("DELETE FROM join_token WHERE expires < now() - interval '30 days'")
        await transaction.execute(
            """INSERT INTO join_token (id, key, expires, uses_left)
               VALUES (%s, %s, now() + make_interval(secs => %s), %s)""",
            (token.id, token.key, expires_seconds, uses),
        )

    await database.transact(write)
    return token.format()
