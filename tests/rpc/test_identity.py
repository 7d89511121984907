"""Join tokens and the proofs that are made with them."""

from __future__ import annotations

from datetime import UTC, datetime

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.error import ConnectionLost
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from rpc.certificates import create_authority
from rpc.identity import IdentityError, JoinToken, TokenInvalid, channel_binding, explain, peer_of, prove, proves

TOKENS = st.builds(
    JoinToken,
    ca_sha256=st.binary(min_size=32, max_size=32),
    id=st.binary(min_size=8, max_size=8).map(bytes.hex),
    secret=st.binary(min_size=20, max_size=20),
)


class TokenTests(SynchronousTestCase):
    @settings(deadline=None)
    @given(TOKENS)
    def test_a_token_is_read_from_its_text(self, token) -> None:
        text = token.format()
        self.assertRegex(text, r"^stanchion-[a-z2-7]{104}$")
        self.assertEqual(JoinToken.parse(text), token)

    @settings(deadline=None)
    @given(TOKENS, st.integers(1, 100))
    def test_a_token_survives_a_wrapped_line(self, token, at) -> None:
        text = token.format()
        self.assertEqual(JoinToken.parse(f"  {text[:at]}\n  {text[at:]}\n"), token)

    @settings(deadline=None)
    @given(TOKENS, st.data())
    def test_a_mistyped_token_is_refused(self, token, data) -> None:
        text = token.format()
        at = data.draw(st.integers(0, len(text) - 1))
        typed = data.draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz234567").filter(lambda c: c != text[at]))
        self.assertRaises(TokenInvalid, JoinToken.parse, text[:at] + typed + text[at + 1 :])

    @settings(deadline=None)
    @given(TOKENS, st.integers(0, 113))
    def test_a_token_that_was_cut_is_refused(self, token, length) -> None:
        self.assertRaises(TokenInvalid, JoinToken.parse, token.format()[:length])

    @settings(deadline=None)
    @given(st.text(max_size=150) | st.text(max_size=120).map("stanchion-".__add__))
    def test_garbage_is_no_token_and_is_not_repeated_in_the_error(self, text) -> None:
        error = self.assertRaises(TokenInvalid, JoinToken.parse, text)
        self.assertIn("join token", str(error))

    def test_a_fresh_token_names_the_authority_and_hides_its_secret(self) -> None:
        authority = create_authority(datetime(2026, 1, 1, tzinfo=UTC)).certificate
        one, other = JoinToken.create(authority), JoinToken.create(authority)
        self.assertEqual(one.ca_sha256, other.ca_sha256)
        self.assertNotEqual(one.id, other.id)
        self.assertNotEqual(one.secret, other.secret)
        self.assertNotIn(repr(one.secret), repr(one))
        self.assertNotEqual(one.key, one.secret)


class ProofTests(SynchronousTestCase):
    @settings(deadline=None)
    @given(TOKENS, st.binary(min_size=32, max_size=32), st.binary(max_size=300))
    def test_a_proof_convinces(self, token, binding, request) -> None:
        self.assertTrue(proves(token.key, prove(token.key, binding, request), binding, request))

    @settings(deadline=None)
    @given(TOKENS, TOKENS, st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32), st.binary())
    def test_a_proof_holds_for_its_token_channel_and_request_only(self, token, other, one, two, request) -> None:
        proof = prove(token.key, one, request)
        self.assertEqual(proves(other.key, proof, one, request), other.key == token.key)
        self.assertEqual(proves(token.key, proof, two, request), one == two)
        self.assertFalse(proves(token.key, proof, one, request + b"x"))
        self.assertFalse(proves(token.key, proof[:-1], one, request))
        self.assertFalse(proves(token.key, b"", one, request))


class PeerTests(SynchronousTestCase):
    def test_a_connection_without_tls_has_no_peer_and_no_binding(self) -> None:
        self.assertRaises(IdentityError, peer_of, StringTransport())
        self.assertRaises(IdentityError, channel_binding, StringTransport())
        self.assertRaises(IdentityError, peer_of, None)

    def test_a_broken_connection_is_explained_in_words(self) -> None:
        self.assertEqual(explain(Failure(ConnectionLost())), "the connection broke off")
        self.assertEqual(explain(Failure(OSError())), "OSError")
