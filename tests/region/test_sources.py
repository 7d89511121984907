"""Boot sources and selections: what is stored, what is refused, and what an import makes of them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from region.images.checks import checked_selection, checked_url
from region.images.sources import CHANNEL, NoSuchSource, SourceInvalid, SourceStore
from region.upstream import DocumentSeen, Selection, Source, SourceFailed
from tests.database import DatabaseTestCase
from tests.region.importing import inline

URL = "http://images.example.com/stable/"
NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
KEYS = b"\x98\x33keys"


class CheckTests(SynchronousTestCase):
    """What is refused before the database sees it."""

    def test_urls_that_are_none_are_refused_with_the_reason(self) -> None:
        for url, reason in {
            "": "give the URL",
            "images.example.com": "must begin with http",
            "ftp://images.example.com/": "must begin with http",
            "http:///stable": "names no host",
            "http://images example.com/": "white space",
            "http://images.example.com/\x00": "control characters",
            "http://images.example.com/?a=b": "no query",
            "http://images.example.com/#top": "no query and no fragment",
            "http://images.example.com:port/": "is not a URL",
            "http://[::1/": "is not a URL",
            "file://elsewhere/srv/images": "absolute path on this host",
            "file:srv/images": "absolute path on this host",
        }.items():
            error = self.assertRaises(SourceInvalid, checked_url, url)
            self.assertEqual(error.field, "url")
            self.assertIn(reason, error.message, url)

    def test_urls_of_this_host_are_stored_in_one_form(self) -> None:
        for url in ("file:///srv/images/", "file:/srv/images/", "file://localhost/srv/images/"):
            self.assertEqual(checked_url(url), "file:///srv/images/")

    def test_selections_that_select_nothing_sensible_are_refused(self) -> None:
        for selection, field in [
            (Selection("", "noble"), "os"),
            (Selection("ubuntu", "no/ble"), "release"),
            (Selection("ubuntu", "noble", arches=()), "arches"),
            (Selection("ubuntu", "noble", subarches=("ga 24",)), "subarches"),
            (Selection("ubuntu", "noble", labels=("*", "")), "labels"),
        ]:
            self.assertEqual(self.assertRaises(SourceInvalid, checked_selection, selection).field, field)

    def test_wildcards_and_boot_loaders_alone_can_be_selected(self) -> None:
        for selection in (Selection("*", "*"), Selection("*", ""), Selection("ubuntu", "noble", ("amd64", "arm64"))):
            self.assertEqual(checked_selection(selection), selection)

    @settings(deadline=None)
    @given(st.text())
    def test_any_text_is_a_url_or_refused(self, url: str) -> None:
        try:
            found = checked_url(url)
        except SourceInvalid as error:
            self.assertEqual(error.field, "url")
        else:
            self.assertRegex(found, "^(https?|file)://")


class SourceStoreTests(DatabaseTestCase):
    """:class:`SourceStore` on a real database."""

    def setUp(self) -> Deferred[None]:  # type: ignore[override]  # trial waits for what setUp returns
        return super().setUp().addCallback(self._begin)

    def _begin(self, _: None) -> None:
        self.sources = SourceStore(self.database, run_in_thread=inline)

    async def refused(self, coroutine: object) -> SourceInvalid:
        try:
            await coroutine  # type: ignore[misc]  # it is a coroutine
        except SourceInvalid as error:
            return error
        raise self.failureException("it was not refused")

    async def test_what_was_stored_is_read_again(self) -> None:
        made = await self.sources.create(URL, keyring_data=KEYS, priority=5, selections=[Selection("ubuntu", "noble")])
        self.assertEqual(await self.sources.get(made.id), made)
        self.assertEqual((made.url, made.keyring_data, made.priority), (URL, KEYS, 5))
        (selection,) = await self.sources.selections(made.id)
        self.assertEqual((selection.os, selection.release, selection.arches), ("ubuntu", "noble", ("*",)))
        self.assertEqual(await self.sources.selection(made.id, selection.id), selection)
        self.assertNotIn("keys", repr(made))

    async def test_the_preferred_source_comes_first(self) -> None:
        low = await self.sources.create(URL, keyring_data=KEYS, priority=1)
        high = await self.sources.create(URL + "x", keyring_data=KEYS, priority=9)
        same = await self.sources.create(URL + "y", keyring_data=KEYS, priority=9)
        self.assertEqual([each.id for each in await self.sources.list()], [high.id, same.id, low.id])
        self.assertEqual([each_source(each).id for each in await self.sources.read()], [high.id, same.id, low.id])

    async def test_exactly_one_way_to_trust_a_source_must_be_given(self) -> None:
        for options in ({}, {"keyring_data": KEYS, "allow_unsigned": True}):
            error = await self.refused(self.sources.create(URL, **options))  # type: ignore[arg-type]  # as it comes
            self.assertIn("exactly one of", error.message)
        self.assertEqual(await self.sources.list(), ())

    async def test_fields_of_the_wrong_kind_are_refused(self) -> None:
        for field, value in {
            "priority": "high",
            "keyring_filename": 5,
            "keyring_data": "text",
            "allow_unsigned": "yes",
        }.items():
            error = await self.refused(self.sources.create(URL, **{"keyring_data": KEYS, field: value}))  # type: ignore[arg-type]  # that is the point
            self.assertEqual(error.field, field)
        for priority in (-1, 2**31, True):
            self.assertEqual(
                (await self.refused(self.sources.create(URL, keyring_data=KEYS, priority=priority))).field, "priority"
            )

    async def test_a_keyring_that_cannot_be_read_is_refused_with_the_reason(self) -> None:
        empty = Path(self.mktemp()).absolute()
        empty.write_bytes(b"")
        for name, reason in {
            "/nowhere/keys.gpg": "/nowhere/keys.gpg cannot be read: No such file",
            "keys.gpg": "must be an absolute path",
            "/": "Is a directory",
            str(empty): "is empty",
            "/a\x00b": "cannot be read",
        }.items():
            error = await self.refused(self.sources.create(URL, keyring_filename=name))
            self.assertEqual(error.field, "keyring_filename")
            self.assertIn(reason, error.message)

    async def test_a_second_source_with_the_same_url_is_refused(self) -> None:
        await self.sources.create(URL, keyring_data=KEYS)
        self.assertEqual((await self.refused(self.sources.create(URL, keyring_data=KEYS))).field, "url")
        other = await self.sources.create(URL + "x", keyring_data=KEYS)
        self.assertEqual((await self.refused(self.sources.update(other.id, url=URL))).field, "url")

    async def test_a_second_source_that_differs_only_in_its_password_is_refused(self) -> None:
        await self.sources.create("http://a:b@images.example.com/@/", keyring_data=KEYS)
        error = await self.refused(self.sources.create("http://c:d@images.example.com/@/", keyring_data=KEYS))
        self.assertEqual(error.field, "url")
        await self.sources.create("http://a:b@images.example.com/", keyring_data=KEYS)

    async def test_a_source_that_is_pointed_elsewhere_knows_what_it_was_called(self) -> None:
        source = await self.sources.create("http://a:b@images.example.com/1/", keyring_data=KEYS)
        for url in ("http://images.example.com/2/", "http://c:d@images.example.com/2/", "http://images.example.com/1/"):
            await self.sources.update(source.id, url=url)
        [read] = await self.sources.read()
        assert isinstance(read, Source)
        self.assertEqual((read.name, read.former), ("http://images.example.com/1/", ("http://images.example.com/2/",)))

    async def test_a_second_selection_of_the_same_release_is_refused(self) -> None:
        source = await self.sources.create(URL, keyring_data=KEYS, selections=[Selection("ubuntu", "noble")])
        error = await self.refused(self.sources.add_selection(source.id, Selection("ubuntu", "noble", ("arm64",))))
        self.assertEqual(error.field, "release")

    async def test_naming_a_keyring_file_replaces_the_keyring_that_was_given(self) -> None:
        path = Path(self.mktemp()).absolute()
        path.write_bytes(KEYS)
        source = await self.sources.create(URL, keyring_data=b"\x99old")
        changed = await self.sources.update(source.id, keyring_filename=str(path))
        self.assertEqual((changed.keyring_filename, changed.keyring_data), (str(path), b""))
        (read,) = await self.sources.read()
        self.assertEqual(each_source(read).keyring, KEYS)

    async def test_an_unknown_field_is_refused_by_its_name(self) -> None:
        source = await self.sources.create(URL, keyring_data=KEYS)
        error = await self.refused(self.sources.update(source.id, prioritty=3))
        self.assertEqual(error.field, "prioritty")
        self.assertIn("priority", error.message)

    async def test_selections_are_changed_and_removed(self) -> None:
        source = await self.sources.create(URL, keyring_data=KEYS)
        made = await self.sources.add_selection(source.id, Selection("ubuntu", "noble"))
        changed = await self.sources.update_selection(source.id, made.id, Selection("ubuntu", "noble", ("arm64",)))
        self.assertEqual((changed.id, changed.arches), (made.id, ("arm64",)))
        (read,) = await self.sources.read()
        self.assertEqual(each_source(read).selections, (Selection("ubuntu", "noble", ("arm64",)),))
        await self.sources.delete_selection(source.id, made.id)
        self.assertEqual(await self.sources.selections(source.id), ())

    async def test_what_is_not_there_is_said_to_be_missing(self) -> None:
        source = await self.sources.create(URL, keyring_data=KEYS)
        for coroutine in (
            self.sources.get(999),
            self.sources.update(999, priority=2),
            self.sources.delete(999),
            self.sources.selections(999),
            self.sources.add_selection(999, Selection("*", "*")),
            self.sources.selection(source.id, 999),
            self.sources.update_selection(source.id, 999, Selection("*", "*")),
            self.sources.delete_selection(source.id, 999),
        ):
            with self.assertRaises(NoSuchSource):
                await coroutine

    async def test_removing_a_source_removes_its_selections(self) -> None:
        source = await self.sources.create(URL, keyring_data=KEYS, selections=[Selection("ubuntu", "noble")])
        await self.sources.delete(source.id)
        self.assertEqual(await self.sources.read(), ())
        self.assertEqual(await self.database.query("SELECT * FROM boot_source_selection"), [])

    async def test_every_change_is_announced(self) -> None:
        announced: list[str] = []
        waiting: Deferred[None] = Deferred()

        def hear(payload: str) -> None:
            announced.append(payload)
            if len(announced) == 7:
                waiting.callback(None)

        listening: Deferred[str] = Deferred()
        self.database.listen(
            CHANNEL, lambda payload: hear(payload) if listening.called else listening.callback(payload)
        )
        await listening
        source = await self.sources.create(URL, keyring_data=KEYS)
        selection = await self.sources.add_selection(source.id, Selection("ubuntu", "noble"))
        await self.sources.update_selection(source.id, selection.id, Selection("ubuntu", "jammy"))
        await self.refused(self.sources.create(URL, keyring_data=KEYS))
        await self.sources.delete_selection(source.id, selection.id)
        await self.sources.update(source.id, priority=2)
        await self.sources.delete(source.id)
        other = await self.sources.create(URL, keyring_data=KEYS)
        await waiting
        self.assertEqual(announced, [str(source.id)] * 6 + [str(other.id)])

    # What an import needs

    async def test_a_source_whose_keyring_went_away_is_failed_and_the_others_are_not(self) -> None:
        path = Path(self.mktemp()).absolute()
        path.write_bytes(KEYS)
        await self.sources.create(URL, keyring_filename=str(path), priority=2)
        other = await self.sources.create(URL + "x", allow_unsigned=True)
        path.unlink()
        failed, read = await self.sources.read()
        assert isinstance(failed, SourceFailed)
        self.assertIn(f"the keyring {path} cannot be read", failed.reason)
        self.assertEqual(each_source(read).id, other.id)

    async def read_one(self) -> Source:
        (read,) = await self.sources.read()
        return each_source(read)

    async def test_documents_that_were_accepted_are_remembered_and_never_get_older(self) -> None:
        await self.sources.create(URL, keyring_data=KEYS)
        source = await self.read_one()
        for moment in (NOW, NOW + timedelta(days=1), NOW):
            await self.sources.accept(self.database, source, [DocumentSeen("index", moment, "0" * 64)])
        self.assertEqual(await self.sources.accepted(), {source.id: {"index": NOW + timedelta(days=1)}})

    async def test_nothing_is_remembered_of_an_unsigned_source(self) -> None:
        await self.sources.create(URL, allow_unsigned=True)
        await self.sources.accept(self.database, await self.read_one(), [DocumentSeen("index", NOW, "0" * 64)])
        self.assertEqual(await self.sources.accepted(), {})

    async def test_nothing_is_remembered_of_a_source_that_was_removed_or_moved_meanwhile(self) -> None:
        made = await self.sources.create(URL, keyring_data=KEYS)
        source = await self.read_one()
        await self.sources.update(made.id, url=URL + "x")
        await self.sources.accept(self.database, source, [DocumentSeen("index", NOW, "0" * 64)])
        await self.sources.delete(made.id)
        await self.sources.accept(self.database, source, [DocumentSeen("index", NOW, "0" * 64)])
        self.assertEqual(await self.sources.accepted(), {})

    async def test_a_source_with_other_keys_forgets_what_it_had_accepted(self) -> None:
        made = await self.sources.create(URL, keyring_data=KEYS)
        await self.sources.accept(self.database, await self.read_one(), [DocumentSeen("index", NOW, "0" * 64)])
        await self.sources.update(made.id, priority=7)
        self.assertEqual(await self.sources.accepted(), {made.id: {"index": NOW}})
        await self.sources.update(made.id, keyring_data=b"\x99other")
        self.assertEqual(await self.sources.accepted(), {})


def each_source(read: Source | SourceFailed) -> Source:
    assert isinstance(read, Source), read
    return read
