"""Where are the certificate authority's keys, and how is one authority replaced by another while racks depend on it?

``ca`` has issued the region's own certificate and is what join tokens name. While the authority is being changed there
is also ``next``: it issues the racks' certificates, and both are trusted. When every rack trusts it, it becomes ``ca``.
Each step can be cut anywhere; the next look at the files ends it or takes it back.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

from attrs import frozen

from rpc.certificates import (
    CertificateInvalid,
    Credentials,
    create_authority,
    expires,
    fingerprint,
    is_issued_by,
    issue_region,
    load_certificate,
    load_credentials,
    remove_unfinished,
    sync_directory,
    write_private,
)

RENEW_BEFORE: Final = timedelta(days=90)
"""How long before the region's own certificate ends it is replaced."""

_RESTORE: Final = "restore it from a backup, or move {directory} away and join every rack again"


class AuthorityError(Exception):
    """The authority's files cannot be read, written or used; the text says which and what to do."""


@frozen
class Keys:
    """The key pairs: the authority's, the one's that is to replace it (None if that is not under way), the region's."""

    ca: Credentials
    next: Credentials | None
    region: Credentials

    @property
    def issuing(self) -> Credentials:
        """The authority that issues the racks' certificates."""
        return self.next or self.ca

    @property
    def trusted(self) -> bytes:
        """Every authority's certificate that is trusted, PEM, one after the other; the region's own issuer first."""
        return self.ca.certificate + (self.next.certificate if self.next else b"")

    @property
    def authorities(self) -> list[str]:
        """The sha256 of each of :attr:`trusted`."""
        return [fingerprint(one.certificate) for one in (self.ca, self.next) if one is not None]


def load_keys(directory: Path, name: str, now: datetime) -> Keys:
    """The key pairs in ``directory``; what is missing there at a first start is made. Blocks.

    The authority's are never replaced here, because every rack has that certificate pinned. The region's are made anew
    when they end soon or were issued by another authority.

    :raises AuthorityError: if a file is missing, unreadable, not what it must be, or cannot be written.
    """
    with _guarded(directory):
        if not (directory / "ca.crt").exists() and (directory / "region.key").exists():
            # Made in this order, so this is no interrupted first start: a new authority would lock every rack out.
            raise AuthorityError(f"{directory / 'ca.crt'} is missing: {_RESTORE.format(directory=directory)}")
        _end_interrupted_change(directory)
        authority = _pair(directory, "ca") or _make(directory, "ca", create_authority(now, f"Stanchion {name}"))
        region = _pair(directory, "region")
        if region is None or expires(region.certificate) - now < RENEW_BEFORE or not _issued(region, authority):
            region = _make(directory, "region", issue_region(authority, now, name))
        keys = Keys(authority, _pair(directory, "next"), region)
    if expires(authority.certificate) <= now:
        raise AuthorityError(
            f"{directory / 'ca.crt'} expired at {expires(authority.certificate):%Y-%m-%d}: move the directory away, "
            "start the region, and join every rack again"
        )
    return keys


def begin_change(directory: Path, name: str, now: datetime) -> tuple[Keys, bool]:
    """Make the authority that is to replace the present one, unless there is one. Blocks.

    :return: the key pairs, and whether it was made just now.
    :raises AuthorityError: if there is no authority yet, or files cannot be read or written.
    """
    read_ca(directory)
    with _guarded(directory):
        _end_interrupted_change(directory)
        made = _pair(directory, "next") is None
        if made:
            _make(directory, "next", create_authority(now, f"Stanchion {name}"))
    return load_keys(directory, name, now), made


def finish_change(directory: Path, name: str, now: datetime) -> Keys:
    """Make the next authority the only one, and the region's certificate one by it. Blocks.

    :raises AuthorityError: if no change is under way, or files cannot be read or written.
    """
    with _guarded(directory):
        _end_interrupted_change(directory)
        if _pair(directory, "next") is None:
            raise AuthorityError("no change of the authority is under way: begin one with stanchion region rotate-ca")
        (directory / "next.key").rename(directory / "ca.key")
        sync_directory(directory)
        # From here on the change will end whatever happens: see _end_interrupted_change.
        (directory / "next.crt").rename(directory / "ca.crt")
        sync_directory(directory)
    return load_keys(directory, name, now)


def read_ca(directory: Path) -> bytes:
    """The certificate, PEM, of the authority that join tokens name, of a region that was started once. Blocks.

    :raises AuthorityError: if there is none, or it cannot be read.
    """
    path = directory / "ca.crt"
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise AuthorityError(f"{path} is not there: start the region once, which makes it") from None
    except OSError as error:
        raise AuthorityError(f"{path}: {error.strerror} (uid {os.geteuid()}); run this as the region's user") from error


def is_changing(directory: Path) -> bool:
    """Whether the authority is being changed at this moment. Blocks.

    :raises AuthorityError: if that cannot be seen.
    """
    try:
        return (directory / "next.crt").exists()
    except OSError as error:
        raise AuthorityError(f"{directory}: {error.strerror}; run this as the region's user") from error


@contextmanager
def _guarded(directory: Path) -> Iterator[None]:
    """The directory for this process alone, and errors in words."""
    try:
        if not directory.exists():
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            sync_directory(directory.parent)  # racks will have pinned what is made in it
        directory.chmod(0o700)
        remove_unfinished(directory)
        # Two that renew the region's pair at once could leave a key with the other's certificate.
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
    except OSError as error:
        raise AuthorityError(f"{error.filename or directory}: {error.strerror}") from error
    except CertificateInvalid as error:
        raise AuthorityError(f"{directory}: {error}; restore the files from a backup") from error


def _end_interrupted_change(directory: Path) -> None:
    """Rename ``next.crt`` if only ``next.key`` was renamed; remove both if they are the present authority's. A key
    without a certificate is what a beginning left."""
    certificate, key = directory / "next.crt", directory / "next.key"
    if not certificate.exists():
        return
    if key.exists():
        authority = directory / "ca.crt"
        if authority.exists() and authority.read_bytes() == certificate.read_bytes():
            # The files of a change that was finished elsewhere were copied over those of the same change under way.
            key.unlink()
            certificate.unlink()
        return
    load_credentials(Credentials((directory / "ca.key").read_bytes(), certificate.read_bytes()))
    certificate.rename(directory / "ca.crt")


def _pair(directory: Path, stem: str) -> Credentials | None:
    key, certificate = directory / f"{stem}.key", directory / f"{stem}.crt"
    if not certificate.exists():
        # The certificate is written last, so a key without one is what an interrupted making left.
        return None
    if not key.exists():
        raise AuthorityError(f"{key} is missing but {certificate} is there: {_RESTORE.format(directory=directory)}")
    credentials = Credentials(key.read_bytes(), certificate.read_bytes())
    load_credentials(credentials)
    return credentials


def _make(directory: Path, stem: str, credentials: Credentials) -> Credentials:
    # Renewing: were the pair replaced file by file, a crash between them would leave two that do not belong together.
    (directory / f"{stem}.crt").unlink(missing_ok=True)
    for path, data in (
        (directory / f"{stem}.key", credentials.key),
        (directory / f"{stem}.crt", credentials.certificate),
    ):
        write_private(path, data)
        if os.geteuid() == 0:
            # Root may have made it for a region that runs as another user, whom the directory belongs to.
            owner = directory.stat()
            os.chown(path, owner.st_uid, owner.st_gid)
    return credentials


def _issued(region: Credentials, authority: Credentials) -> bool:
    return is_issued_by(load_certificate(region.certificate), load_certificate(authority.certificate))
