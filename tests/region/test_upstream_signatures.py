"""Tests for :mod:`region.upstream.signatures`, with real signatures by a key made for the run."""

from __future__ import annotations

import os
from unittest import mock

from twisted.trial.unittest import SynchronousTestCase

from region.upstream.signatures import BadSignature, binary_keyring, is_signed, unverified_payload, verified_payload
from tests.streams import signer

PAYLOAD = b'{"format": "index:1.0",\n "text": "- dashes",\n "-----not armour-----": 1}\n'


class VerifiedPayloadTests(SynchronousTestCase):
    """Only what was signed, by a key of the keyring, is ever read."""

    def setUp(self) -> None:
        self.signer = signer()
        self.document = self.signer.sign(PAYLOAD)

    def refused(self, document: bytes, keyring: bytes | None = None) -> str:
        """Why a document is refused."""
        error = self.assertRaises(
            BadSignature, verified_payload, document, self.signer.keyring if keyring is None else keyring
        )
        return str(error)

    def test_a_changed_document_is_refused(self) -> None:
        self.assertIn("changed after", self.refused(self.document.replace(b"index:1.0", b"index:1.1")))

    def test_a_document_that_is_not_signed_is_refused(self) -> None:
        self.assertIn("not a clear-signed document", self.refused(PAYLOAD))

    def test_a_signature_by_another_key_is_refused_and_names_the_key(self) -> None:
        reason = self.refused(self.document, signer("Another").keyring)
        self.assertRegex(reason, r"signed with key [0-9A-F]{16}, which is not in the keyring")

    def test_an_empty_keyring_trusts_nobody(self) -> None:
        self.assertIn("keyring is empty", self.refused(self.document, b" \n"))

    def test_a_keyring_that_is_not_one_trusts_nobody(self) -> None:
        self.refused(self.document, b"not a keyring")
        self.assertIn("no complete", self.refused(self.document, b"-----BEGIN PGP PUBLIC KEY BLOCK-----\nabc"))

    def test_two_signed_messages_in_one_document_are_refused(self) -> None:
        self.assertIn("more than one signed message", self.refused(self.document + self.signer.sign(b'{"x": 1}')))

    def test_a_document_without_its_signature_is_refused(self) -> None:
        self.refused(self.document[: self.document.index(b"-----BEGIN PGP SIGNATURE")])

    def test_words_before_the_message_are_refused(self) -> None:
        self.assertIn("not a clear-signed document", self.refused(b'{"x": 1}\n' + self.document))

    def test_words_after_the_message_are_not_part_of_what_is_read(self) -> None:
        document = self.document + b'{"format": "evil"}\n'
        self.assertEqual(verified_payload(document, self.signer.keyring), PAYLOAD)

    def test_words_in_the_armour_headers_are_not_part_of_what_is_read(self) -> None:
        document = self.document.replace(b"Hash: SHA", b'Hash: SHA256\n{"evil": 1}\nHash: SHA', 1)
        try:
            payload = verified_payload(document, self.signer.keyring)
        except BadSignature:
            return
        self.assertEqual(payload, PAYLOAD)

    def test_the_payload_is_what_was_signed_with_its_dashes(self) -> None:
        self.assertIn(b"- -----not armour", self.signer.sign(b"-----not armour-----\n"))
        self.assertEqual(verified_payload(self.document, self.signer.keyring), PAYLOAD)

    def test_an_armoured_keyring_is_as_good_as_a_binary_one(self) -> None:
        self.assertEqual(binary_keyring(self.signer.armoured), self.signer.keyring)
        both = signer("Another").armoured + b"\nsome words\n" + self.signer.armoured
        self.assertEqual(verified_payload(self.document, both), PAYLOAD)

    def test_a_damaged_armoured_keyring_is_named_as_such(self) -> None:
        damaged = self.signer.armoured.replace(b"\n\n", b"\n\n*", 1)
        self.assertIn("armoured but damaged", self.refused(self.document, damaged))

    def test_without_gpgv_nothing_is_believed(self) -> None:
        with mock.patch.dict(os.environ, {"PATH": "/nowhere"}):
            self.assertIn("install the package gpgv", self.refused(self.document))


class UnverifiedPayloadTests(SynchronousTestCase):
    """A source that may be unsigned may also be signed: its text is then read, unverified."""

    def test_the_text_of_a_signed_document_is_read(self) -> None:
        document = signer().sign(PAYLOAD)
        self.assertTrue(is_signed(document))
        self.assertEqual(unverified_payload(document).strip(), PAYLOAD.strip())

    def test_what_only_begins_like_a_signed_document_is_refused(self) -> None:
        for document in (b"-----BEGIN PGP SIGNED MESSAGE----- x\n\n{}", b"-----BEGIN PGP SIGNED MESSAGE-----\xff"):
            self.assertRaises(BadSignature, unverified_payload, document)
