"""Who the other end of a link is, by its certificate, and how one that has none yet proves that it was invited.

TLS 1.3 only. Both ends verify each other against the region's own authority; only a rack that is about to enrol comes
without a certificate, knows the authority by its fingerprint alone, and proves over that very channel that it knows
the secret of a join token, so that neither token nor proof is of use on another channel.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
import zlib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final
from weakref import WeakKeyDictionary

from attrs import field, frozen
from cryptography import x509
from OpenSSL import SSL, crypto
from twisted.internet.error import ConnectionLost
from twisted.internet.interfaces import IOpenSSLClientConnectionCreator, IOpenSSLServerConnectionCreator
from twisted.protocols.tls import TLSMemoryBIOProtocol
from twisted.python.failure import Failure
from zope.interface import implementer

from rpc.certificates import (
    UNREADABLE,
    CertificateInvalid,
    Credentials,
    fingerprint,
    load_certificates,
    load_credentials,
    moment,
    role_and_id,
)
from rpc.commands import Role

EXPORTER_LABEL: Final = b"EXPORTER-stanchion-enrol"
"""The label under which both ends take their channel's binding from TLS (RFC 8446, section 7.5)."""

BINDING_BYTES: Final = 32


class IdentityError(Exception):
    """The peer's certificate does not say who it is; the text says why."""


class TokenInvalid(ValueError):
    """This text is not a join token; the text of the error says what is wrong with it."""


@frozen
class Peer:
    """The other end of a link. ``id`` is a rack's system id, ``address`` is for people, ``certificate`` is the
    certificate's sha256 as 64 hexadecimal digits (empty if it showed none)."""

    role: Role
    id: str
    address: str
    certificate: str = ""

    def __str__(self) -> str:
        name = f"{self.role} {self.id}" if self.id else self.role
        return f"{name} at {self.address}" if self.address else name


def address_of(transport: Any) -> str:
    """The other end's address and port, as text."""
    peer = None if transport is None else transport.getPeer()
    host, port = getattr(peer, "host", None), getattr(peer, "port", None)
    if host is None:
        return str(peer)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def peer_of(transport: Any) -> Peer:
    """Who is at the other end of ``transport``, whose TLS handshake is done.

    :raises IdentityError: if this is not TLS 1.3, the certificate was not verified, or does not say who its holder is.
    """
    connection = _connection(transport)
    if connection.get_protocol_version_name() != "TLSv1.3":
        raise IdentityError(f"the link is {connection.get_protocol_version_name()}, not TLS 1.3")
    address = address_of(transport)
    certificate = connection.get_peer_certificate(as_cryptography=True)
    if certificate is None:
        return Peer("anonymous", "", address)
    if not connection.get_verify_mode() & SSL.VERIFY_PEER:
        raise IdentityError("the peer's certificate was not verified")
    try:
        role, system_id = role_and_id(certificate)
    except CertificateInvalid as error:
        raise IdentityError(str(error)) from error
    return Peer(role, system_id, address, fingerprint(certificate))


def channel_binding(transport: Any) -> bytes:
    """32 bytes that only the two ends of this TLS channel know."""
    binding: bytes = _connection(transport).export_keying_material(EXPORTER_LABEL, BINDING_BYTES)
    return binding


def _connection(transport: Any) -> SSL.Connection:
    handle = transport.getHandle() if hasattr(transport, "getHandle") else None
    if not isinstance(handle, SSL.Connection):
        raise IdentityError("the link is not TLS")
    return handle


# Verifying.


_refusals: Final[WeakKeyDictionary[SSL.Connection, str]] = WeakKeyDictionary()
"""Why a connection's peer was refused, in words. OpenSSL itself only says that verifying failed."""

_NOT_YET_VALID: Final = 9
_EXPIRED: Final = 10
_STRANGER: Final = (
    "it is signed by another region's authority, or by one that is not this region's any more: join the rack again "
    "with a new token (stanchion rack join --again)"
)
_PROBLEMS: Final = {
    7: "its signature is wrong",
    18: "it is signed by itself, not by this region's authority",
    19: _STRANGER,
    20: _STRANGER,
    21: _STRANGER,
    26: "it is not meant for this end of a link",
}
"""By OpenSSL's number (openssl-verification-options(1)); anything else is shown as that number."""

Accept = Callable[[x509.Certificate, int, int], str]
"""Given a certificate, OpenSSL's verdict (0: good) and its depth: why it is refused, or nothing if it is accepted."""


def _verdict(certificate: x509.Certificate, error: int) -> str:
    if not error:
        return ""
    here = f"the clock here says {moment(datetime.now(UTC))}: compare the clocks of both machines"
    if error == _NOT_YET_VALID:
        return f"it is not valid yet: it begins at {moment(certificate.not_valid_before_utc)}, and {here}"
    if error == _EXPIRED:
        end = moment(certificate.not_valid_after_utc)
        return f"it has expired: it ended at {end}, and {here}; if they agree, join the rack again"
    return _PROBLEMS.get(error, f"OpenSSL's verification error {error}")


def _callback(accept: Accept) -> Callable[[SSL.Connection, crypto.X509, int, int, int], bool]:
    def verify(connection: SSL.Connection, certificate: crypto.X509, error: int, depth: int, good: int) -> bool:
        try:
            problem = accept(certificate.to_cryptography(), error, depth)
        except UNREADABLE as unreadable:  # the parsers differ in what they take; what one refuses is refused
            problem = f"it cannot be read: {unreadable}"
        if problem:
            _refusals.setdefault(connection, problem)
        return not problem

    return verify


def _accept_verified(certificate: x509.Certificate, error: int, depth: int) -> str:
    return _verdict(certificate, error)


def _accept_region(certificate: x509.Certificate, error: int, depth: int) -> str:
    if error or depth:
        return _verdict(certificate, error)
    try:
        role, _ = role_and_id(certificate)
    except CertificateInvalid as invalid:
        return str(invalid)
    return "" if role == "region" else f"it is for a {role}, not for a region"


_NOT_THE_TOKEN_S: Final = (
    "its authority is not the one that the token names: is this the right region, and was the token made after the "
    "region last changed its authority?"
)


def _accept_pinned(ca_sha256: str) -> Accept:
    def accept(certificate: x509.Certificate, error: int, depth: int) -> str:
        if depth and error == 19:  # an authority that OpenSSL was not told of: it is ours if it is the pinned one
            return "" if fingerprint(certificate) == ca_sha256 else _NOT_THE_TOKEN_S
        return _accept_region(certificate, error, depth)

    return accept


@implementer(IOpenSSLServerConnectionCreator, IOpenSSLClientConnectionCreator)
class TLS:
    """Makes the TLS end of connections from one context, for Twisted. Connections that there are keep the context that
    they were made from when :meth:`become` replaces it."""

    def __init__(self, context: SSL.Context) -> None:
        self._context = context

    def become(self, other: TLS) -> None:
        """Make new connections as ``other`` does, from now on."""
        self._context = other._context

    def serverConnectionForTLS(self, tlsProtocol: TLSMemoryBIOProtocol) -> SSL.Connection:
        """The server's end of a new connection."""
        return self._make()

    def clientConnectionForTLS(self, tlsProtocol: TLSMemoryBIOProtocol) -> SSL.Connection:
        """The client's end of a new connection."""
        return self._make()

    def _make(self) -> SSL.Connection:
        return SSL.Connection(self._context, None)


def _context(accept: Accept, mode: int, ca: bytes | None, credentials: Credentials | None) -> TLS:
    context = SSL.Context(SSL.TLS_METHOD)
    context.set_min_proto_version(SSL.TLS1_3_VERSION)
    # No resumption: every connection shows and verifies its certificates. The tickets would cost memory, too.
    context.set_options(SSL.OP_NO_TICKET | SSL.OP_NO_COMPRESSION)
    context.set_session_cache_mode(SSL.SESS_CACHE_OFF)
    context.set_mode(SSL.MODE_RELEASE_BUFFERS)
    context.set_verify(mode, _callback(accept))
    if credentials is not None:
        key, certificate = load_credentials(credentials)
        context.use_certificate(certificate)
        context.use_privatekey(key)
    if ca is not None:
        store = context.get_cert_store()
        if store is None:
            raise IdentityError("OpenSSL gave no certificate store")
        for authority in load_certificates(ca):
            store.add_cert(crypto.X509.from_cryptography(authority))
            if credentials is not None and authority.subject == certificate.issuer:
                # Sent along, so that a rack that is about to enrol can compare it with its token's fingerprint.
                context.add_extra_chain_cert(authority)
    return TLS(context)


def server_tls(credentials: Credentials, ca: bytes) -> TLS:
    """The region's end: shows ``credentials``; a client shows a certificate by one of the authorities ``ca`` (PEM, one
    after the other), or none.

    :raises CertificateInvalid: if key, certificate or authority are no good.
    """
    return _context(_accept_verified, SSL.VERIFY_PEER, ca, credentials)


def client_tls(credentials: Credentials, ca: bytes) -> TLS:
    """A rack's end: shows ``credentials``; the server must be a region by one of the authorities ``ca`` (PEM, one after
    the other).

    :raises CertificateInvalid: if key, certificate or authority are no good.
    """
    return _context(_accept_region, SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT, ca, credentials)


def enrolling_tls(ca_sha256: bytes) -> TLS:
    """The end of a rack that is about to enrol: it shows nothing; the server must be a region by the authority whose
    certificate has this sha256 (32 bytes)."""
    return _context(_accept_pinned(ca_sha256.hex()), SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT, None, None)


_OF_CERTIFICATES: Final = {
    "unknown ca": "the other end does not know our certificate's authority: the rack joined another region, or was "
    "away while the region changed its authority; join it again with a new token (stanchion rack join --again)",
    "bad certificate": "the other end refuses our certificate",
    "certificate expired": "the other end finds our certificate expired",
    "certificate required": "the other end wants a certificate and we have none",
    "unsupported certificate": "the other end refuses our certificate: it is not meant for this end of a link",
}
"""What the other end means by an alert that is about our certificate (RFC 8446, section 6.2)."""

_OF_TIME: Final = ("bad certificate", "certificate expired")
"""With these, OpenSSL says that a certificate is not valid yet, or not any more."""

_ALERTS: Final = {
    **_OF_CERTIFICATES,
    "protocol version": "the other end does not speak TLS 1.3",
    "unsupported protocol": "the other end does not speak TLS 1.3",
    "wrong version number": "the other end does not speak TLS",
    "http request": "the other end speaks HTTP: is this the right port?",
}


def explain(reason: Failure, transport: Any = None) -> str:
    """Why a connection ended, in words; of a TLS failure, what was wrong with whose certificate."""
    error = reason.value
    if isinstance(error, ConnectionLost):
        return "the connection broke off"
    if not isinstance(error, SSL.Error):
        return str(error) or type(error).__name__
    handle = transport.getHandle() if hasattr(transport, "getHandle") else None
    if isinstance(handle, SSL.Connection) and (problem := _refusals.get(handle)):
        return f"the peer's certificate is refused: {problem}"
    texts = _texts(error)
    for text in texts:
        for alert, meaning in _ALERTS.items():
            if alert in text:
                return f"{meaning} ({text})" + (_own_times(handle) if alert in _OF_TIME else "")
    return f"TLS failed: {', '.join(texts) or error!r}"


def distrusts(reason: Failure, transport: Any = None) -> bool:
    """Whether a connection ended because one end does not accept the other's certificate: trying again is of little
    use until somebody has seen to that."""
    if not isinstance(reason.value, SSL.Error):
        return False
    handle = transport.getHandle() if hasattr(transport, "getHandle") else None
    if isinstance(handle, SSL.Connection) and handle in _refusals:
        return True
    return any(alert in text for text in _texts(reason.value) for alert in _OF_CERTIFICATES)


def _texts(error: SSL.Error) -> list[str]:
    details = error.args[0] if error.args and isinstance(error.args[0], list) else []
    return [str(detail[-1]) for detail in details if detail]


def _own_times(handle: Any) -> str:
    """When our own certificate is good, next to what our clock says."""
    own = handle.get_certificate(as_cryptography=True) if isinstance(handle, SSL.Connection) else None
    if own is None:
        return ""
    return (
        f"; ours is good from {moment(own.not_valid_before_utc)} to {moment(own.not_valid_after_utc)}, and the clock "
        f"here says {moment(datetime.now(UTC))}: compare the clocks of both machines; if they agree, join the rack "
        "again"
    )


# Enrolling.

_PREFIX: Final = "stanchion-"
_TOKEN_VERSION: Final = 1
_ID_BYTES: Final = 8
_SECRET_BYTES: Final = 20


@frozen
class JoinToken:
    """An invitation to enrol.

    ``ca_sha256`` is the sha256 of the authority's certificate (32 bytes), ``id`` names the token in the region's
    database (16 hexadecimal digits), ``secret`` is 20 random bytes that only the token's text holds.
    """

    ca_sha256: bytes
    id: str
    secret: bytes = field(repr=False)

    @classmethod
    def create(cls, ca: bytes) -> JoinToken:
        """A fresh token for the authority whose certificate is ``ca`` (PEM)."""
        return cls(
            bytes.fromhex(fingerprint(ca)), secrets.token_bytes(_ID_BYTES).hex(), secrets.token_bytes(_SECRET_BYTES)
        )

    @property
    def key(self) -> bytes:
        """What the region keeps of the secret: its sha256, with which proofs are checked."""
        return hashlib.sha256(self.secret).digest()

    def format(self) -> str:
        """The text to give to ``stanchion rack join``: 114 letters, digits and a hyphen."""
        body = bytes([_TOKEN_VERSION]) + self.ca_sha256 + bytes.fromhex(self.id) + self.secret
        checked = body + zlib.crc32(body).to_bytes(4, "big")
        return _PREFIX + base64.b32encode(checked).decode("ascii").rstrip("=").lower()

    @classmethod
    def parse(cls, text: str) -> JoinToken:
        """The token with this text; white space in it, as from a wrapped line, does not matter.

        :raises TokenInvalid: if it is none. The message never has the token's text.
        """
        compact = "".join(text.split())
        if not compact.startswith(_PREFIX):
            raise TokenInvalid(f"this is no join token: one begins with {_PREFIX!r}")
        encoded = compact.removeprefix(_PREFIX).upper()
        try:
            checked = base64.b32decode(encoded + "=" * (-len(encoded) % 8))
        except (binascii.Error, ValueError) as error:
            raise TokenInvalid("the join token has characters that no token has: copy it again") from error
        body, check = checked[:-4], checked[-4:]
        if zlib.crc32(body).to_bytes(4, "big") != check:
            raise TokenInvalid("the join token is incomplete or mistyped: copy it again")
        if body[:1] != bytes([_TOKEN_VERSION]) or len(body) != 1 + BINDING_BYTES + _ID_BYTES + _SECRET_BYTES:
            raise TokenInvalid("the join token is of another version of Stanchion")
        rest = body[1:]
        return cls(rest[:32], rest[32 : 32 + _ID_BYTES].hex(), rest[32 + _ID_BYTES :])


def prove(key: bytes, binding: bytes, request: bytes) -> bytes:
    """The proof that whoever has the token's ``key`` asks, on the channel with this ``binding``, for a certificate for
    ``request`` (PEM): an HMAC-SHA256, 32 bytes."""
    return hmac.digest(key, binding + request, "sha256")


def proves(key: bytes, proof: bytes, binding: bytes, request: bytes) -> bool:
    """Whether ``proof`` is what :func:`prove` makes, found out in constant time."""
    return hmac.compare_digest(prove(key, binding, request), proof)


def same_authority(token: JoinToken, ca: bytes) -> bool:
    """Whether one of ``ca`` (PEM, one after the other) is the certificate that the token names."""
    return token.ca_sha256.hex() in map(fingerprint, load_certificates(ca))
