"""Who is this rack, and which region did it join? One file, written at once by ``stanchion rack join``."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any, Final

from attrs import asdict, field, fields, frozen

from rpc.addresses import split_address
from rpc.certificates import CertificateInvalid, Credentials, check_issued, sync_directory, write_private

_NAME: Final = "identity.json"


class NotJoined(Exception):
    """The rack has no usable identity; the text says why, and how to join."""


@frozen
class Identity:
    """A rack's name for people, its system id, the HOST:PORT of the region that it joined, and, all in PEM, its private
    key, its certificate and the certificate of the region's authority."""

    system_id: str
    name: str
    region: str
    certificate: str
    ca: str
    key: str = field(repr=False)

    @property
    def credentials(self) -> Credentials:
        """Key and certificate."""
        return Credentials(self.key.encode("ascii"), self.certificate.encode("ascii"))

    @property
    def authority(self) -> bytes:
        """The authority's certificate, PEM."""
        return self.ca.encode("ascii")


def write_identity(directory: Path, identity: Identity) -> Path:
    """Keep ``identity`` in ``directory``, for its owner's eyes only; the file that it is in.

    Where root joins a rack that runs as another user, the file belongs to whom the directory above belongs.

    :raises OSError: if that cannot be done.
    """
    prepare_directory(directory)
    path = directory / _NAME
    write_private(path, json.dumps(asdict(identity), indent=1).encode("utf-8"))
    if os.geteuid() == 0:
        owner = directory.parent.stat()
        os.chown(path, owner.st_uid, owner.st_gid)
        os.chown(directory, owner.st_uid, owner.st_gid)
    return path


def prepare_directory(directory: Path) -> None:
    """Make ``directory`` if need be. :raises OSError: if it cannot be made, or nothing can be written there."""
    if not directory.exists():
        directory.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        sync_directory(directory.parent)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(directory))


def read_identity(directory: Path) -> Identity:
    """The identity that is kept in ``directory``.

    :raises NotJoined: if there is none, or it is no good.
    """
    path = directory / _NAME
    try:
        identity = _parse(json.loads(path.read_bytes()))
        held_by = check_issued(identity.certificate.encode("ascii"), identity.key.encode("ascii"), identity.authority)
    except FileNotFoundError:
        raise NotJoined(
            "this rack has not joined a region yet: make a token where the region runs (stanchion region join-token), "
            "then run here: stanchion rack join --region HOST:PORT TOKEN"
        ) from None
    except OSError as error:
        raise NotJoined(f"{path} cannot be read: {error.strerror}; run the rack as the user that owns it") from error
    except (ValueError, CertificateInvalid, RecursionError) as error:
        raise NotJoined(
            f"{path} is no good ({error}); join again: stanchion rack join --region HOST:PORT TOKEN"
        ) from error
    if held_by != identity.system_id:
        raise NotJoined(
            f"{path} is no good: its certificate is for rack {held_by}, not {identity.system_id}; "
            "join again: stanchion rack join --region HOST:PORT TOKEN"
        )
    return identity


def _parse(document: Any) -> Identity:
    names = [attribute.name for attribute in fields(Identity)]
    if not isinstance(document, dict) or not all(isinstance(document.get(name), str) for name in names):
        raise ValueError(f"it must have {', '.join(names)}, each as text")
    identity = Identity(**{name: document[name] for name in names})
    split_address(identity.region)
    return identity
