"""Which certificate of a rack is good: the old one until the new one is used, and none that was not issued to it."""

from __future__ import annotations

from datetime import UTC, datetime

from region.authority import Authority, EnrolledRack
from region.authority_files import Keys
from region.issued import KEPT, IssuedCertificates
from region.racks import RackRefused, RackRegistry, RackStore
from rpc.certificates import (
    check_issued,
    create_authority,
    fingerprint,
    issue_rack,
    issue_region,
    make_request,
    new_key,
)
from tests.database import DatabaseTestCase

NOW = datetime.now(UTC)
AUTHORITY = create_authority(NOW)
NEXT = create_authority(NOW)
KEYS = Keys(AUTHORITY, None, issue_region(AUTHORITY, NOW))


class CertificateTestCase(DatabaseTestCase):
    """A rack, aaaaaa, that has its first certificate."""

    def setUp(self):
        ready = super().setUp()
        self.store = RackStore(self.database)
        self.authority = Authority(KEYS, self.database, self.store)
        self.issued = IssuedCertificates(self.database)
        return ready.addCallback(lambda _: self.run_async(self.enrol("aaaaaa", "one")))

    async def enrol(self, system_id: str, name: str) -> None:
        certificate = issue_rack(self.authority.keys.issuing, make_request(new_key()), system_id, NOW)
        self.first = fingerprint(certificate)

        async def work(transaction):
            await self.store.enrol(transaction, system_id, name, self.first)
            await self.issued.add(transaction, system_id, certificate, self.authority.keys.authorities, stored=True)

        await self.database.transact(work)

    async def renew(self) -> str:
        return fingerprint((await self.renewed()).certificate)

    async def renewed(self) -> EnrolledRack:
        return await self.authority.renew("aaaaaa", make_request(new_key()))

    async def refusal(self, sha256: str, system_id: str = "aaaaaa") -> str:
        with self.assertRaises(RackRefused) as caught:
            await self.issued.admit(system_id, sha256)
        return str(caught.exception)

    async def on_record(self) -> str:
        row = await self.database.one("SELECT certificate_sha256 FROM rack WHERE system_id = 'aaaaaa'")
        assert row is not None
        return str(row[0])


class AdmitTests(CertificateTestCase):
    async def test_a_rack_gets_in_with_its_certificate_however_often(self) -> None:
        await self.issued.admit("aaaaaa", self.first)
        await self.issued.admit("aaaaaa", self.first)

    async def test_until_the_new_certificate_is_used_both_are_good_and_then_only_the_new_one(self) -> None:
        await self.issued.admit("aaaaaa", self.first)
        second = await self.renew()
        await self.issued.admit("aaaaaa", self.first)
        self.assertEqual(await self.on_record(), self.first)
        await self.issued.admit("aaaaaa", second)
        self.assertEqual(await self.on_record(), second)
        self.assertIn("was replaced at", await self.refusal(self.first))
        await self.issued.admit("aaaaaa", second)

    async def test_a_first_certificate_that_was_never_used_is_replaced_too(self) -> None:
        await self.issued.admit("aaaaaa", await self.renew())
        self.assertIn("was replaced at", await self.refusal(self.first))

    async def test_of_two_renewals_the_rack_may_use_either_whose_answer_it_got(self) -> None:
        # The first answer was late, or was lost: the rack asked again, and the region cannot know which one it keeps.
        second, third = await self.renew(), await self.renew()
        await self.issued.admit("aaaaaa", second)
        await self.issued.admit("aaaaaa", third)
        self.assertIn("was replaced at", await self.refusal(second))

    async def test_a_certificate_that_was_not_issued_to_the_rack_is_refused(self) -> None:
        self.assertIn("is not on record", await self.refusal("0" * 64))
        mine = self.first
        await self.enrol("bbbbbb", "two")
        self.assertIn("is not on record", await self.refusal(mine, "bbbbbb"))
        self.assertIn("is not on record", await self.refusal(""))

    async def test_a_rack_that_is_gone_or_revoked_is_refused_and_told_what_to_do(self) -> None:
        self.assertIn("is not enrolled here", await self.refusal(self.first, "zzzzzz"))
        await self.store.revoke("aaaaaa")
        why = await self.refusal(self.first)
        self.assertIn("was revoked at", why)
        self.assertIn("stanchion racks forget one", why)
        await self.store.forget("aaaaaa")
        self.assertIn("was forgotten", await self.refusal(self.first))

    async def test_a_refused_certificate_changes_nothing(self) -> None:
        await self.refusal("0" * 64)
        await self.issued.admit("aaaaaa", self.first)


class RenewTests(CertificateTestCase):
    async def test_a_renewed_certificate_is_the_rack_s_and_for_the_new_key(self) -> None:
        key = new_key()
        renewed = await self.authority.renew("aaaaaa", make_request(key))
        self.assertEqual(check_issued(renewed.certificate, key, renewed.ca), "aaaaaa")

    async def test_a_rack_that_is_gone_or_revoked_gets_none(self) -> None:
        for change in (self.store.revoke, self.store.forget):
            await change("aaaaaa")
            with self.assertRaises(RackRefused):
                await self.renewed()

    async def test_a_request_that_is_none_is_refused_and_nothing_is_issued(self) -> None:
        with self.assertRaises(RackRefused) as caught:
            await self.authority.renew("aaaaaa", b"garbage")
        self.assertIn("cannot be read", str(caught.exception))
        self.assertEqual(await self.database.one("SELECT count(*) FROM rack_certificate"), (1,))

    async def test_however_often_a_rack_renews_what_is_kept_has_a_bound_and_its_own_stays(self) -> None:
        await self.issued.admit("aaaaaa", self.first)
        for _ in range(KEPT + 5):
            await self.renew()
        self.assertEqual(await self.database.one("SELECT count(*) FROM rack_certificate"), (KEPT + 1,))
        await self.issued.admit("aaaaaa", self.first)

    async def test_a_stored_certificate_is_kept_for_its_first_use_however_often_storing_the_next_fails(self) -> None:
        # The link is not dropped for a new certificate, so it may be months until the rack shows it.
        await self.issued.admit("aaaaaa", self.first)
        second = await self.renew()
        await self.issued.stored("aaaaaa", second)
        for _ in range(KEPT + 5):
            await self.renew()
        await self.issued.admit("aaaaaa", second)

    async def test_while_the_authority_changes_a_rack_gets_one_by_the_next_and_both_to_trust(self) -> None:
        self.authority.keys = Keys(AUTHORITY, NEXT, KEYS.region)
        renewed = await self.renewed()
        self.assertEqual(renewed.ca, AUTHORITY.certificate + NEXT.certificate)
        key = new_key()
        renewed = await self.authority.renew("aaaaaa", make_request(key))
        self.assertEqual(check_issued(renewed.certificate, key, NEXT.certificate), "aaaaaa")


class BehindTests(CertificateTestCase):
    """Who must still be told of an authority."""

    async def names(self, system_id: str | None = None) -> list[str]:
        return [rack.name for rack in await self.issued.not_told(self.authority.keys.authorities, system_id)]

    async def locked_out(self, certificate: bytes) -> list[str]:
        return [rack.name for rack in await self.issued.not_trusting(fingerprint(certificate))]

    async def test_a_rack_is_behind_until_it_has_stored_the_new_authority_or_used_it(self) -> None:
        await self.enrol("bbbbbb", "two")
        self.assertEqual(await self.names(), [])
        self.authority.keys = Keys(AUTHORITY, NEXT, KEYS.region)
        self.assertEqual(await self.names(), ["one", "two"])
        self.assertEqual(await self.names("bbbbbb"), ["two"])
        renewed = await self.renew()
        self.assertEqual(await self.names(), ["one", "two"])
        self.assertTrue(await self.issued.stored("aaaaaa", renewed))
        self.assertEqual(await self.names(), ["two"])
        self.assertEqual(await self.locked_out(NEXT.certificate), ["two"])
        self.assertEqual(await self.locked_out(AUTHORITY.certificate), [])
        used = fingerprint((await self.authority.renew("bbbbbb", make_request(new_key()))).certificate)
        await self.issued.admit("bbbbbb", used)
        self.assertEqual(await self.locked_out(NEXT.certificate), [])
        # When the old one is retired, both are to be told to trust it no more.
        self.authority.keys = Keys(NEXT, None, KEYS.region)
        self.assertEqual(await self.names(), ["one", "two"])

    async def test_a_rack_trusts_what_came_with_the_last_certificate_that_it_stored(self) -> None:
        # Another region process, which has not seen that the authority is being changed, has renewed it since.
        await self.issued.admit("aaaaaa", self.first)
        self.authority.keys = Keys(AUTHORITY, NEXT, KEYS.region)
        await self.issued.stored("aaaaaa", await self.renew())
        self.assertEqual(await self.locked_out(NEXT.certificate), [])
        self.authority.keys = KEYS
        await self.issued.stored("aaaaaa", await self.renew())
        self.assertEqual(await self.locked_out(NEXT.certificate), ["one"])

    async def test_nobody_waits_for_a_revoked_rack(self) -> None:
        await self.store.revoke("aaaaaa")
        self.assertEqual(await self.locked_out(NEXT.certificate), [])

    async def test_a_rack_cannot_say_that_it_stores_what_another_was_given(self) -> None:
        await self.enrol("bbbbbb", "two")
        self.assertFalse(await self.issued.stored("bbbbbb", await self.renew()))

    async def test_racks_from_before_certificates_were_recorded_are_asked_to_renew_and_get_in(self) -> None:
        await self.database.execute("UPDATE rack_certificate SET authorities = '{}'")
        self.assertEqual(await self.names(), ["one"])
        await self.issued.admit("aaaaaa", self.first)


class RegistryTests(CertificateTestCase):
    async def test_a_revoked_rack_is_asked_no_more_but_still_known(self) -> None:
        registry = RackRegistry(self.store, lambda: NOW)
        await registry.refresh()
        self.assertEqual(list(registry.enrolled()), ["aaaaaa"])
        self.assertTrue(await self.store.revoke("aaaaaa"))
        self.assertFalse(await self.store.revoke("aaaaaa"))
        await registry.refresh()
        self.assertEqual((list(registry.enrolled()), list(registry.revoked())), ([], ["aaaaaa"]))

    async def test_a_rack_is_renamed_but_to_no_name_in_use_and_none_that_is_none(self) -> None:
        await self.enrol("bbbbbb", "two")
        self.assertTrue(await self.store.rename("aaaaaa", "cellar"))
        self.assertEqual([rack.name for rack in await self.store.list()], ["cellar", "two"])
        for name, said in (("two", "another rack is named 'two'"), ("a b", "cannot be a rack's name"), ("", "cannot")):
            with self.assertRaises(RackRefused) as caught:
                await self.store.rename("aaaaaa", name)
            self.assertIn(said, str(caught.exception))
        self.assertFalse(await self.store.rename("zzzzzz", "other"))
