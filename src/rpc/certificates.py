"""How the keys and certificates of a link are made, kept and compared.

The region is its own certificate authority. A certificate says in one URI what its holder is: ``urn:stanchion:region``
or ``urn:stanchion:rack:<system id>`` (RFC 5280, subjectAltName); names and addresses are not compared, for racks find
their region under addresses that change. Everything is ECDSA on P-256, and PEM outside this module.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from attrs import field, frozen
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from rpc.commands import Role

AUTHORITY_LIFE: Final = timedelta(days=20 * 365)
CERTIFICATE_LIFE: Final = timedelta(days=2 * 365)
BACKDATED: Final = timedelta(hours=1)
"""How long before now a certificate begins, for a peer whose clock is behind."""

REGION_URI: Final = "urn:stanchion:region"
RACK_URI: Final = "urn:stanchion:rack:"

UNFINISHED: Final = 60.0
"""Seconds after which a file that was to replace another is taken for that of a process that was killed."""

UNREADABLE: Final = (ValueError, UnsupportedAlgorithm, x509.InvalidVersion)
"""What the library raises for keys, certificates and requests that it cannot read, some of it as late as when it is
asked for a part of one."""

_SYSTEM_ID: Final = re.compile(r"[a-z0-9]{1,32}\Z")


class CertificateInvalid(ValueError):
    """A key, certificate or request is not what it must be; the text says which and why."""


@frozen
class Credentials:
    """A private key and its certificate, both PEM."""

    key: bytes = field(repr=False)
    certificate: bytes


def new_key() -> bytes:
    """A fresh private key, as unencrypted PKCS #8 in PEM."""
    return _key_pem(ec.generate_private_key(ec.SECP256R1()))


def create_authority(now: datetime, name: str = "Stanchion") -> Credentials:
    """A new certificate authority, good for 20 years. It signs certificates of peers and no further authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    # The serial number in the name tells authorities of different regions apart in people's eyes, and in OpenSSL's.
    subject = _name(f"{name} authority {secrets.token_hex(4)}")
    certificate = (
        _builder(subject, subject, key.public_key(), now, AUTHORITY_LIFE, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return Credentials(_key_pem(key), _pem(certificate))


def issue_region(authority: Credentials, now: datetime, name: str = "region") -> Credentials:
    """A new key and server certificate for a region, good for 2 years."""
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _issue(
        authority, key.public_key(), now, f"Stanchion {name}", REGION_URI, ExtendedKeyUsageOID.SERVER_AUTH
    )
    return Credentials(_key_pem(key), certificate)


def make_request(key: bytes) -> bytes:
    """A certificate signing request for ``key``, in PEM. It asks for no name: the region decides what it certifies."""
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return request.sign(_load_key(key), hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def issue_rack(authority: Credentials, request: bytes, system_id: str, now: datetime) -> bytes:
    """The client certificate, in PEM, of the rack ``system_id``, for the key that signed ``request``; for 2 years.

    :raises CertificateInvalid: if the request is no good. Its text may be shown to whoever sent it.
    """
    if _SYSTEM_ID.match(system_id) is None:
        raise CertificateInvalid(f"{system_id!r} cannot be a system id: use lower-case letters and digits")
    try:
        parsed = x509.load_pem_x509_csr(request)
        public = parsed.public_key()
        signed = parsed.is_signature_valid
    except UNREADABLE as error:
        raise CertificateInvalid(f"the certificate signing request cannot be read: {error}") from error
    if not isinstance(public, ec.EllipticCurvePublicKey) or not isinstance(public.curve, ec.SECP256R1):
        raise CertificateInvalid("the certificate signing request's key is not ECDSA on P-256")
    if not signed:
        raise CertificateInvalid("the certificate signing request is not signed by its own key")
    return _issue(
        authority, public, now, f"Stanchion rack {system_id}", RACK_URI + system_id, ExtendedKeyUsageOID.CLIENT_AUTH
    )


def role_and_id(certificate: x509.Certificate) -> tuple[Role, str]:
    """What the certificate's holder is, and a rack's system id (a region has none).

    :raises CertificateInvalid: if it does not say just one of the two.
    """
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, x509.DuplicateExtension, *UNREADABLE) as error:
        raise CertificateInvalid(f"the certificate does not say what its holder is ({error})") from error
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    match uris:
        case ["urn:stanchion:region"]:
            return "region", ""
        case [uri] if uri.startswith(RACK_URI) and _SYSTEM_ID.match(uri.removeprefix(RACK_URI)):
            return "rack", uri.removeprefix(RACK_URI)
    raise CertificateInvalid(f"the certificate is for {', '.join(uris) or 'nobody'}, not for a region or a rack")


def check_issued(certificate: bytes, key: bytes, authorities: bytes) -> str:
    """The system id in a rack's ``certificate``, once it is certain that it belongs to ``key`` and is signed by one of
    ``authorities`` (certificates in PEM, one after the other).

    :raises CertificateInvalid: if it does not.
    """
    issued = load_certificate(certificate)
    if _public_key(issued) != _load_key(key).public_key():
        raise CertificateInvalid("the certificate that the region issued is not for this rack's key")
    if not any(is_issued_by(issued, authority) for authority in load_certificates(authorities)):
        raise CertificateInvalid("the certificate that the region issued is not signed by its authority")
    role, system_id = role_and_id(issued)
    if role != "rack":
        raise CertificateInvalid(f"the certificate that the region issued is for a {role}, not for a rack")
    return system_id


def is_issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Whether ``authority`` has signed ``certificate``."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm, x509.InvalidVersion):
        return False
    return True


def fingerprint(certificate: bytes | x509.Certificate) -> str:
    """The sha256 of the certificate's DER form, as 64 hexadecimal digits, as ``openssl x509 -fingerprint`` has it."""
    loaded = certificate if isinstance(certificate, x509.Certificate) else load_certificate(certificate)
    return hashlib.sha256(loaded.public_bytes(serialization.Encoding.DER)).hexdigest()


def expires(certificate: bytes) -> datetime:
    """When the certificate ends, in UTC."""
    return load_certificate(certificate).not_valid_after_utc


def moment(when: datetime) -> str:
    """A time as people are told it: ``2026-11-30 12:00:00 UTC``."""
    return f"{when.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def load_certificates(certificates: bytes) -> tuple[x509.Certificate, ...]:
    """The certificates in PEM text, at least one. :raises CertificateInvalid: if there is none, or one is damaged."""
    if not certificates.isascii():
        raise CertificateInvalid("the certificates have characters that PEM does not have")
    try:
        return tuple(x509.load_pem_x509_certificates(certificates))
    except UNREADABLE as error:
        raise CertificateInvalid(f"the certificates cannot be read: {error}") from error


def load_certificate(certificate: bytes) -> x509.Certificate:
    """The certificate in PEM text. :raises CertificateInvalid: if there is none."""
    if not certificate.isascii():
        raise CertificateInvalid("the certificate has characters that PEM does not have")
    try:
        return x509.load_pem_x509_certificate(certificate)
    except UNREADABLE as error:
        raise CertificateInvalid(f"the certificate cannot be read: {error}") from error


def _public_key(certificate: x509.Certificate) -> object:
    try:
        return certificate.public_key()
    except UNREADABLE as error:
        raise CertificateInvalid(f"the certificate's key cannot be read: {error}") from error


def load_credentials(credentials: Credentials) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """Key and certificate, once it is certain that they belong together. :raises CertificateInvalid: if not."""
    key, certificate = _load_key(credentials.key), load_certificate(credentials.certificate)
    if _public_key(certificate) != key.public_key():
        raise CertificateInvalid("the private key is not the certificate's: restore the pair, or join again")
    return key, certificate


def write_private(path: Path, data: bytes) -> None:
    """Make the file ``path`` hold ``data``, readable by its owner only, wholly or not at all whatever happens.

    :raises OSError: if that cannot be.
    """
    remove_unfinished(path.parent)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def remove_unfinished(directory: Path) -> None:
    """Remove what processes that were killed in :func:`write_private` left in a directory: it may be private keys."""
    for left in directory.glob(f".*.{'[0-9a-f]' * 16}"):
        try:
            if left.stat().st_mtime < time.time() - UNFINISHED:
                left.unlink()
        except FileNotFoundError:  # it has its name just now
            continue


def sync_directory(path: Path) -> None:
    """Have what was renamed in the directory ``path`` survive a power cut."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _issue(
    authority: Credentials,
    public: ec.EllipticCurvePublicKey,
    now: datetime,
    name: str,
    uri: str,
    purpose: x509.ObjectIdentifier,
) -> bytes:
    signer, issuer = load_credentials(authority)
    certificate = (
        _builder(_name(name), issuer.subject, public, now, CERTIFICATE_LIFE, signer.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]), critical=False)
        .sign(signer, hashes.SHA256())
    )
    return _pem(certificate)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    now: datetime,
    life: timedelta,
    issuing: ec.EllipticCurvePublicKey,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuing), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _load_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (*UNREADABLE, TypeError) as error:
        raise CertificateInvalid(f"the private key cannot be read: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CertificateInvalid("the private key is not ECDSA")
    return key
