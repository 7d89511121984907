"""Who becomes a rack: the authority's files, join tokens, and enrolment in one transaction."""

from __future__ import annotations

import shutil
import stat
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from region.authority import Authority, TokenRefused
from region.authority_files import AuthorityError, Keys, begin_change, finish_change, is_changing, load_keys, read_ca
from region.racks import RackRefused, RackStore
from region.tokens import create_join_token, list_join_tokens, revoke_join_token
from rpc.certificates import (
    check_issued,
    expires,
    fingerprint,
    load_certificate,
    load_certificates,
    make_request,
    new_key,
)
from rpc.identity import JoinToken, prove
from tests.database import DatabaseTestCase

NOW = datetime(2026, 11, 30, tzinfo=UTC)
BINDING = b"b" * 32


class FileTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp()) / "authority"
        self.addCleanup(shutil.rmtree, self.directory.parent)

    def load(self, now: datetime = NOW) -> Keys:
        return load_keys(self.directory, "test", now)

    def test_the_first_start_makes_it_and_the_next_finds_it(self) -> None:
        first = self.load()
        self.assertEqual(first, self.load())
        self.assertEqual(read_ca(self.directory), first.ca.certificate)
        self.assertIsNone(first.next)

    def test_private_keys_are_their_owner_s_only(self) -> None:
        self.load()
        self.assertEqual(stat.S_IMODE(self.directory.stat().st_mode), 0o700)
        for name in ("ca.key", "region.key"):
            self.assertEqual(stat.S_IMODE((self.directory / name).stat().st_mode), 0o600, name)

    def test_a_first_start_that_was_cut_at_any_file_is_done_again(self) -> None:
        self.load()
        order = ["ca.key", "ca.crt", "region.key", "region.crt"]
        for count in range(len(order)):
            for name in order[count:]:
                (self.directory / name).unlink(missing_ok=True)
            self.assertEqual(self.load(), self.load())

    def test_the_region_s_certificate_is_renewed_in_time_and_the_authority_s_stays(self) -> None:
        first = self.load()
        later = expires(first.region.certificate) - timedelta(days=30)
        second = self.load(later)
        self.assertEqual(second.ca, first.ca)
        self.assertGreater(expires(second.region.certificate), later + timedelta(days=300))

    def test_a_certificate_of_another_authority_is_replaced(self) -> None:
        self.load()
        other = load_keys(self.directory.parent / "other", "other", NOW).ca
        (self.directory / "ca.key").write_bytes(other.key)
        (self.directory / "ca.crt").write_bytes(other.certificate)
        keys = self.load()
        self.assertEqual(keys.ca, other)
        self.assert_issued(keys.region.certificate, other.certificate)

    def assert_issued(self, certificate: bytes, authority: bytes) -> None:
        load_certificate(certificate).verify_directly_issued_by(load_certificate(authority))

    def test_a_lost_authority_is_said_and_no_other_is_made_in_its_place(self) -> None:
        self.load()
        (self.directory / "ca.crt").unlink()
        self.assertIn("ca.crt is missing", str(self.assertRaises(AuthorityError, self.load)))

    def test_a_lost_key_is_said_and_nothing_is_made_in_its_place(self) -> None:
        authority = self.load().ca
        (self.directory / "ca.key").unlink()
        error = self.assertRaises(AuthorityError, self.load)
        self.assertIn("ca.key is missing", str(error))
        self.assertEqual(read_ca(self.directory), authority.certificate)

    def test_a_damaged_certificate_is_said(self) -> None:
        self.load()
        (self.directory / "ca.crt").write_bytes(b"garbage")
        self.assertIn("restore the files", str(self.assertRaises(AuthorityError, self.load)))

    def test_an_authority_that_has_expired_is_not_used(self) -> None:
        authority = self.load().ca
        error = self.assertRaises(AuthorityError, self.load, expires(authority.certificate) + timedelta(days=1))
        self.assertIn("expired", str(error))

    def test_reading_the_ca_of_a_region_that_never_ran_says_so(self) -> None:
        self.assertIn("start the region once", str(self.assertRaises(AuthorityError, read_ca, self.directory)))

    # Another authority in place of this one.

    def begin(self) -> Keys:
        return begin_change(self.directory, "test", NOW)[0]

    def finish(self) -> Keys:
        return finish_change(self.directory, "test", NOW)

    def test_a_finished_change_that_is_copied_over_one_under_way_is_finished_there_too(self) -> None:
        # As an operator does for a region process on another host, with a program that copies and deletes nothing.
        self.load()
        self.begin()
        other = self.directory.parent / "other"
        shutil.copytree(self.directory, other)
        finished = self.finish()
        self.assertFalse(is_changing(self.directory))
        shutil.copytree(self.directory, other, dirs_exist_ok=True)
        self.assertEqual(load_keys(other, "test", NOW), finished)
        self.assertEqual(finished.authorities, [fingerprint(finished.ca.certificate)])
        self.assertEqual([path.name for path in other.glob("next.*")], [])

    def test_while_the_authority_is_changed_both_are_trusted_and_the_next_one_issues(self) -> None:
        before = self.load()
        keys, made = begin_change(self.directory, "test", NOW)
        assert keys.next is not None
        self.assertTrue(made)
        self.assertTrue(is_changing(self.directory))
        self.assertEqual((keys.ca, keys.region), (before.ca, before.region))
        self.assertEqual(keys.issuing, keys.next)
        self.assertEqual([fingerprint(one) for one in load_certificates(keys.trusted)], keys.authorities)
        self.assertEqual(keys.authorities, [fingerprint(keys.ca.certificate), fingerprint(keys.next.certificate)])
        self.assertEqual(read_ca(self.directory), before.ca.certificate)
        self.assertEqual(stat.S_IMODE((self.directory / "next.key").stat().st_mode), 0o600)

    def test_a_change_that_is_under_way_is_not_begun_again(self) -> None:
        self.load()
        keys = self.begin()
        self.assertEqual(begin_change(self.directory, "test", NOW), (keys, False))
        self.assertEqual(self.load(), keys)

    def test_when_a_change_ends_the_next_authority_is_the_only_one_and_has_issued_the_region_s_certificate(
        self,
    ) -> None:
        self.load()
        changing = self.begin()
        keys = self.finish()
        self.assertEqual((keys.ca, keys.next), (changing.next, None))
        self.assertNotEqual(keys.region, changing.region)
        self.assert_issued(keys.region.certificate, keys.ca.certificate)
        self.assertEqual(self.load(), keys)
        self.assertEqual(read_ca(self.directory), keys.ca.certificate)
        self.assertEqual(sorted(path.name for path in self.directory.iterdir()),
                         ["ca.crt", "ca.key", "region.crt", "region.key"])  # fmt: skip

    def test_a_change_that_was_cut_while_it_ended_ends_with_the_next_look(self) -> None:
        for first in (self.load, self.begin):
            self.load()
            changing = self.begin()
            (self.directory / "next.key").rename(self.directory / "ca.key")
            if first == self.load:
                self.assertEqual(first().ca, changing.next)
                self.assertIsNone(self.load().next)
            else:
                self.assertEqual(first().ca, changing.next)

    def test_a_change_that_was_cut_while_it_began_is_none(self) -> None:
        before = self.load()
        self.begin()
        (self.directory / "next.crt").unlink()
        self.assertEqual(self.load(), before)
        self.assertIn("no change", str(self.assertRaises(AuthorityError, self.finish)))
        self.assertIsNotNone(self.begin().next)

    def test_no_change_is_begun_where_there_is_no_authority(self) -> None:
        self.assertIn("start the region once", str(self.assertRaises(AuthorityError, self.begin)))
        self.assertFalse(self.directory.exists())


class EnrolTests(DatabaseTestCase):
    def setUp(self):
        self.directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.directory)
        keys = load_keys(self.directory / "authority", "test", NOW)
        ready = super().setUp()
        self.authority = Authority(keys, self.database, RackStore(self.database))
        self.key = new_key()
        self.request = make_request(self.key)
        return ready

    async def token(self, **options) -> JoinToken:
        return JoinToken.parse(await create_join_token(self.database, self.authority.keys.ca.certificate, **options))

    async def enrol(self, token: JoinToken, name: str = "rack-1", *, binding: bytes = BINDING, proved: bytes = BINDING):
        proof = prove(token.key, proved, self.request)
        return await self.authority.enrol(binding, token.id, proof, self.request, name)

    async def refusal(self, kind: type[Exception], *arguments, **keywords) -> str:
        with self.assertRaises(kind) as caught:
            await self.enrol(*arguments, **keywords)
        return str(caught.exception)

    async def test_a_rack_with_a_token_gets_a_certificate_of_its_own(self) -> None:
        enrolled = await self.enrol(await self.token())
        self.assertEqual(check_issued(enrolled.certificate, self.key, enrolled.ca), enrolled.system_id)
        [rack] = await self.authority.racks.list()
        self.assertEqual(rack.system_id, enrolled.system_id)
        self.assertEqual(rack.certificate_sha256, fingerprint(enrolled.certificate))

    async def test_a_token_is_good_for_as_many_racks_as_it_says(self) -> None:
        token = await self.token(uses=2)
        await self.enrol(token, "a")
        await self.enrol(token, "b")
        self.assertIn("was used already", await self.refusal(TokenRefused, token, "c"))

    async def test_a_name_in_use_is_refused_and_does_not_use_the_token_up(self) -> None:
        await self.enrol(await self.token(), "a")
        token = await self.token()
        self.assertIn("named 'a' has joined already", await self.refusal(RackRefused, token, "a"))
        await self.enrol(token, "b")

    async def test_an_expired_token_is_refused(self) -> None:
        token = await self.token(expires_seconds=-1)
        self.assertIn("expired at", await self.refusal(TokenRefused, token))

    async def test_a_proof_made_on_another_channel_is_refused(self) -> None:
        token = await self.token()
        self.assertIn("no join token", await self.refusal(TokenRefused, token, proved=b"x" * 32))

    async def test_a_stranger_cannot_tell_a_wrong_secret_from_an_unknown_token(self) -> None:
        token = await self.token(expires_seconds=-1)
        wrong = JoinToken(token.ca_sha256, token.id, b"x" * 20)
        unknown = JoinToken(token.ca_sha256, "00" * 8, token.secret)
        self.assertEqual(await self.refusal(TokenRefused, wrong), await self.refusal(TokenRefused, unknown))

    async def test_the_secret_is_not_stored(self) -> None:
        token = await self.token()
        row = await self.database.one("SELECT key FROM join_token")
        assert row is not None
        self.assertEqual(row[0], token.key)
        self.assertNotEqual(row[0], token.secret)

    async def test_a_request_that_is_no_request_is_refused_and_does_not_use_the_token_up(self) -> None:
        token = await self.token()
        self.request = b"garbage"
        self.assertIn("cannot be read", await self.refusal(TokenRefused, token))
        self.request = make_request(self.key)
        await self.enrol(token)

    # Tokens that are taken back.

    async def test_a_token_that_was_revoked_is_refused_and_says_so_to_whoever_has_it(self) -> None:
        token = await self.token(uses=5)
        self.assertTrue(await revoke_join_token(self.database, token.id))
        self.assertIn("was revoked at", await self.refusal(TokenRefused, token))
        wrong = JoinToken(token.ca_sha256, token.id, b"x" * 20)
        self.assertIn("no join token of this region fits", await self.refusal(TokenRefused, wrong))

    async def test_tokens_are_listed_with_their_state_and_without_their_secret(self) -> None:
        good, spent, old, revoked = [
            await self.token(), await self.token(), await self.token(expires_seconds=-1), await self.token()
        ]  # fmt: skip
        await self.enrol(spent)
        await revoke_join_token(self.database, revoked.id)
        states = {one.id: one.state for one in await list_join_tokens(self.database)}
        self.assertEqual(states, {good.id: "good", spent.id: "used up", old.id: "expired", revoked.id: "revoked"})

    async def test_there_is_nothing_to_revoke_where_there_is_no_token(self) -> None:
        self.assertFalse(await revoke_join_token(self.database, "00" * 8))
