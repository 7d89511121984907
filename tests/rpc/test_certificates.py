"""What certificates say, and that only the right ones are issued and believed."""

from __future__ import annotations

import base64
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError
from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from rpc.certificates import (
    CertificateInvalid,
    Credentials,
    check_issued,
    create_authority,
    expires,
    fingerprint,
    issue_rack,
    issue_region,
    load_certificate,
    load_credentials,
    make_request,
    new_key,
    role_and_id,
    write_private,
)
from tests.examples import examples

NOW = datetime(2026, 6, 1, 12, 0, tzinfo=UTC)


def request_by(key, name="mallory") -> bytes:
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(subject)
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier("urn:stanchion:region")]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    return request.public_bytes(serialization.Encoding.PEM)


class DamagedTests(SynchronousTestCase):
    """Whatever was sent as a certificate or a request: it is read, or it is invalid, and nothing else."""

    authority = create_authority(NOW)
    key = new_key()
    request = make_request(key)
    certificate = issue_rack(authority, request, "abc234", NOW)

    def damaged(self, pem: bytes, place: int, put: bytes, cut: int) -> bytes:
        first, *lines, last = pem.strip().split(b"\n")
        data = base64.b64decode(b"".join(lines))
        place %= len(data)
        data = data[:place] + put + data[place + cut :]
        return b"\n".join([first, base64.b64encode(data), last, b""])

    def look(self, request: bytes, certificate: bytes) -> None:
        for ask in (
            lambda: issue_rack(self.authority, request, "abc234", NOW),
            lambda: check_issued(certificate, self.key, self.authority.certificate),
            lambda: check_issued(self.certificate, self.key, certificate),
            lambda: role_and_id(load_certificate(certificate)),
            lambda: load_credentials(Credentials(self.key, certificate)),
        ):
            try:
                ask()
            except CertificateInvalid as error:
                self.assertTrue(str(error))

    @examples(150)
    @given(st.integers(0, 2000), st.binary(max_size=3), st.integers(0, 3))
    def test_a_few_bytes_that_are_others(self, place, put, cut) -> None:
        self.look(*(self.damaged(pem, place, put, cut) for pem in (self.request, self.certificate)))

    def test_versions_keys_and_curves_that_there_are_not(self) -> None:
        data = base64.b64decode(b"".join(self.certificate.strip().split(b"\n")[1:-1]))
        for text in (b"\xa0\x03\x02\x01\x02", bytes.fromhex("2a8648ce3d0201"), bytes.fromhex("2a8648ce3d030107")):
            self.look(self.request, self.damaged(self.certificate, data.index(text) + len(text) - 1, b"\x30", 1))
        data = base64.b64decode(b"".join(self.request.strip().split(b"\n")[1:-1]))
        broken = self.damaged(self.request, data.index(b"\x02\x01\x00") + 2, b"\x30", 1)
        error = self.assertRaises(CertificateInvalid, issue_rack, self.authority, broken, "abc234", NOW)
        self.assertIn("cannot be read", str(error))

    def test_what_is_around_a_certificate_is_ascii_as_well(self) -> None:
        self.assertRaises(CertificateInvalid, load_certificate, "é\n".encode() + self.certificate)
        self.assertRaises(
            CertificateInvalid, check_issued, self.certificate, self.key, self.authority.certificate + b"\xff"
        )


class IssuingTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.authority = create_authority(NOW)
        self.region = issue_region(self.authority, NOW)
        self.key = new_key()
        self.rack = issue_rack(self.authority, make_request(self.key), "abc234", NOW)

    def test_certificates_say_what_their_holder_is(self) -> None:
        self.assertEqual(role_and_id(load_certificate(self.region.certificate)), ("region", ""))
        self.assertEqual(role_and_id(load_certificate(self.rack)), ("rack", "abc234"))

    def test_the_authority_itself_is_nobody(self) -> None:
        self.assertRaises(CertificateInvalid, role_and_id, load_certificate(self.authority.certificate))

    def test_a_racks_certificate_is_valid_for_a_client_and_ends_in_two_years(self) -> None:
        store = Store([load_certificate(self.authority.certificate)])
        verified = PolicyBuilder().store(store).time(NOW).build_client_verifier()
        self.assertEqual(len(verified.verify(load_certificate(self.rack), []).chain), 2)
        self.assertEqual(expires(self.rack), NOW + timedelta(days=730))
        later = PolicyBuilder().store(store).time(NOW + timedelta(days=731)).build_client_verifier()
        self.assertRaises(VerificationError, later.verify, load_certificate(self.rack), [])

    def test_a_certificate_is_valid_at_once_for_a_peer_whose_clock_is_behind(self) -> None:
        self.assertEqual(load_certificate(self.rack).not_valid_before_utc, NOW - timedelta(hours=1))

    def test_what_a_request_asks_for_beyond_its_key_is_ignored(self) -> None:
        issued = load_certificate(
            issue_rack(self.authority, request_by(ec.generate_private_key(ec.SECP256R1())), "xyz789", NOW)
        )
        self.assertEqual(role_and_id(issued), ("rack", "xyz789"))
        self.assertNotIn("mallory", issued.subject.rfc4514_string())

    def test_a_request_with_another_kind_of_key_is_refused(self) -> None:
        for key in (rsa.generate_private_key(65537, 2048), ec.generate_private_key(ec.SECP384R1())):
            error = self.assertRaises(CertificateInvalid, issue_rack, self.authority, request_by(key), "abc234", NOW)
            self.assertIn("not ECDSA on P-256", str(error))

    def test_a_request_that_is_not_signed_by_its_key_is_refused(self) -> None:
        der = bytearray(x509.load_pem_x509_csr(make_request(self.key)).public_bytes(serialization.Encoding.DER))
        der[-1] ^= 1
        damaged = x509.load_der_x509_csr(bytes(der)).public_bytes(serialization.Encoding.PEM)
        error = self.assertRaises(CertificateInvalid, issue_rack, self.authority, damaged, "abc234", NOW)
        self.assertIn("not signed by its own key", str(error))

    def test_garbage_is_no_request(self) -> None:
        for garbage in (b"", b"garbage", self.rack, self.key):
            self.assertRaises(CertificateInvalid, issue_rack, self.authority, garbage, "abc234", NOW)

    def test_a_system_id_cannot_smuggle_another_name(self) -> None:
        for name in ("", "ABC", "a b", "a:b", "../x", "a\n", "x" * 33):
            self.assertRaises(CertificateInvalid, issue_rack, self.authority, make_request(self.key), name, NOW)

    def test_a_certificate_that_names_two_holders_names_nobody(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        uris = [x509.UniformResourceIdentifier(f"urn:stanchion:{who}") for who in ("region", "rack:abc234")]
        both = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(x509.Name([]))
            .public_key(key.public_key())
            .serial_number(1)
            .not_valid_before(NOW)
            .not_valid_after(NOW + timedelta(days=1))
            .add_extension(x509.SubjectAlternativeName(uris), critical=False)
            .sign(key, hashes.SHA256())
        )
        self.assertRaises(CertificateInvalid, role_and_id, both)


class CheckingTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.authority = create_authority(NOW)
        self.key = new_key()
        self.rack = issue_rack(self.authority, make_request(self.key), "abc234", NOW)

    def test_a_rack_accepts_the_certificate_for_its_key(self) -> None:
        self.assertEqual(check_issued(self.rack, self.key, self.authority.certificate), "abc234")

    def test_a_rack_refuses_one_for_another_key(self) -> None:
        error = self.assertRaises(CertificateInvalid, check_issued, self.rack, new_key(), self.authority.certificate)
        self.assertIn("not for this rack's key", str(error))

    def test_a_rack_refuses_one_by_another_authority(self) -> None:
        other = create_authority(NOW)
        error = self.assertRaises(CertificateInvalid, check_issued, self.rack, self.key, other.certificate)
        self.assertIn("not signed by its authority", str(error))

    def test_a_key_and_a_certificate_that_do_not_belong_together_are_refused(self) -> None:
        self.assertRaises(CertificateInvalid, load_credentials, Credentials(new_key(), self.rack))
        self.assertRaises(CertificateInvalid, load_credentials, Credentials(b"garbage", self.rack))
        self.assertRaises(CertificateInvalid, load_credentials, Credentials(self.key, b"garbage"))

    def test_a_fingerprint_is_the_sha256_of_the_der_form(self) -> None:
        self.assertEqual(fingerprint(self.rack), load_certificate(self.rack).fingerprint(hashes.SHA256()).hex())

    def test_a_private_key_is_not_shown_by_repr(self) -> None:
        self.assertNotIn("PRIVATE", repr(Credentials(self.key, self.rack)))


class WritingTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.directory.mkdir()
        self.path = self.directory / "key.pem"

    def test_a_private_file_is_readable_by_its_owner_only(self) -> None:
        write_private(self.path, b"one")
        self.assertEqual(self.path.read_bytes(), b"one")
        self.assertEqual(stat.S_IMODE(self.path.stat().st_mode), 0o600)

    def test_an_existing_file_is_replaced_whatever_its_mode(self) -> None:
        self.path.write_bytes(b"old")
        self.path.chmod(0o644)
        write_private(self.path, b"new")
        self.assertEqual(self.path.read_bytes(), b"new")
        self.assertEqual(stat.S_IMODE(self.path.stat().st_mode), 0o600)

    def test_a_failed_write_leaves_the_old_file_and_no_other(self) -> None:
        write_private(self.path, b"old")

        def full(self, target):
            raise OSError(28, "No space left on device")

        self.patch(Path, "rename", full)
        self.assertRaises(OSError, write_private, self.path, b"new")
        self.assertEqual([entry.name for entry in self.directory.iterdir()], ["key.pem"])
        self.assertEqual(self.path.read_bytes(), b"old")
