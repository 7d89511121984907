"""Tests for :mod:`region.images.plan`: its properties for whatever sources say, and each of its reasons by example."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime

from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from region.images.plan import Assembly, Plan, assemble, plan
from region.upstream import (
    Broken,
    DocumentFailed,
    DocumentSeen,
    Problem,
    Selection,
    Source,
    SourceFailed,
    SourceRead,
    UpstreamImage,
)
from rpc.manifest import EMPTY, Image, ImageFile, ImageKey, Manifest

End = SourceRead | SourceFailed

NOW = datetime(2026, 3, 4, 12, 0, tzinfo=UTC)
RELEASES = ("focal", "jammy", "noble")
VERSIONS = ("20260101", "20260202")
CONTENT_IDS = ("c:one", "c:two")
URLS = ("http://a.example/", "http://b.example/", "http://c.example/")
NAMES = ("boot-kernel", "squashfs")


def digest(text: str) -> str:
    """A sha256."""
    return hashlib.sha256(text.encode()).hexdigest()


def an_image(
    release: str = "noble",
    version: str = "20260101",
    url: str = URLS[0],
    content_id: str = CONTENT_IDS[0],
    salt: str = "",
    **attributes: str,
) -> Image:
    """An image of two files; the ``squashfs`` is the same in every image of its version, whatever its ``salt``."""
    contents = {"boot-kernel": f"{release} {version} {salt} kernel", "squashfs": f"{release} {version} squashfs"}
    return Image(
        os="ubuntu", release=release, arch="amd64", subarch="ga", kflavor="generic", label="stable", version=version,
        product=f"p:{release}", content_id=content_id, source=url,
        files=tuple(ImageFile(name, name, digest(text), len(text)) for name, text in contents.items()),
        attributes=tuple(attributes.items()),
    )  # fmt: skip


def an_offer(image: Image) -> UpstreamImage:
    """An image that a source offers."""
    return UpstreamImage(image, tuple((file.sha256, f"{image.source}{file.sha256}") for file in image.files))


def a_source(url: str = URLS[0], priority: int = 1, releases: Sequence[str] = ("*",)) -> Source:
    """A source that selects some releases."""
    selections = tuple(Selection("ubuntu", release) for release in releases)
    return Source(URLS.index(url) + 1, url, b"key", False, priority, selections)


def a_read(source: Source, *images: Image, failed: Sequence[str] = (), broken: Sequence[Broken] = ()) -> SourceRead:
    """A source that was read and offers these images; some of its documents may have failed."""
    seen = [DocumentSeen(name, NOW, digest(name)) for name in ("index", *CONTENT_IDS) if name not in failed]
    return SourceRead(
        source,
        tuple(an_offer(image) for image in images),
        documents=tuple(seen),
        failed=tuple(DocumentFailed(name, "it is not JSON") for name in failed),
        listed_broken=tuple(broken),
    )


def everything(*manifests_or_plans: Manifest | Plan) -> set[str]:
    """Every content that these need, all of it verified."""
    found: set[str] = set()
    for each in manifests_or_plans:
        found.update(each.blobs if isinstance(each, Manifest) else (it.sha256 for it in each.downloads))
    return found


KEYS = {release: an_image(release).key for release in RELEASES}

images = st.builds(
    an_image,
    st.sampled_from(RELEASES),
    st.sampled_from(VERSIONS),
    st.sampled_from(URLS),
    st.sampled_from(CONTENT_IDS),
    st.sampled_from(["", "other"]),
    support_eol=st.sampled_from(["2029", "2030"]),
)
manifests = st.lists(images, max_size=4, unique_by=lambda image: image.key).map(Manifest)


@st.composite
def ends(draw: st.DrawFn) -> list[End]:
    """How reading some of the sources ended, in any order."""
    found: list[End] = []
    for url in draw(st.lists(st.sampled_from(URLS), unique=True)):
        selected = draw(st.lists(st.sampled_from((*RELEASES, "*")), unique=True))
        source = a_source(url, draw(st.integers(1, 2)), selected)
        if draw(st.integers(0, 3)) == 0:
            found.append(SourceFailed(source, "no route to host"))
            continue
        failed = draw(st.lists(st.sampled_from(CONTENT_IDS), unique=True, max_size=1))
        offered = [
            an_image(
                release,
                draw(st.sampled_from(VERSIONS)),
                url,
                draw(st.sampled_from([name for name in CONTENT_IDS if name not in failed])),
                draw(st.sampled_from(["", "other"])),
                support_eol=draw(st.sampled_from(["2029", "2030"])),
            )
            for release in draw(st.lists(st.sampled_from(RELEASES), unique=True))
        ]
        keys = st.sampled_from([*KEYS.values(), None])
        broken = [
            Broken(draw(st.sampled_from(CONTENT_IDS)), f"p:{release}", "20260202", draw(keys), "it has no files")
            for release in draw(st.lists(st.sampled_from(RELEASES), unique=True, max_size=1))
        ]
        found.append(a_read(source, *offered, failed=failed, broken=broken))
    return found


def may_go(image: Image, found: Sequence[End]) -> bool:
    """Whether there is any reason at all to remove a published image; says it in other words than the plan does."""
    for end in found:
        if end.source.url == image.source:
            if not any(selection.release in ("*", image.release) for selection in end.source.selections):
                return True
            if isinstance(end, SourceFailed):
                return False
            names = {document.content_id for document in end.failed}
            named = {(entry.content_id, entry.product) for entry in end.listed_broken}
            keys = {entry.key for entry in end.listed_broken} | {offer.image.key for offer in end.images}
            return (
                image.content_id not in names
                and (image.content_id, image.product) not in named
                and image.key not in keys
            )
    return True


class PropertyTests(SynchronousTestCase):
    """What holds whatever the sources say and whatever could be fetched."""

    def run_it(self, data: st.DataObject) -> tuple[list[End], Manifest, set[str], Plan, Assembly]:
        """Any sources, any published manifest, any contents verified."""
        found, previous = data.draw(ends()), data.draw(manifests)
        planned = plan(found, previous)
        contents = sorted(everything(planned, previous))
        verified = set(data.draw(st.lists(st.sampled_from(contents), unique=True)) if contents else [])
        if data.draw(st.booleans()):
            verified = set(contents) - verified
        return found, previous, verified, planned, assemble(planned, previous, verified, {})

    @settings(deadline=None, max_examples=80)
    @given(st.data())
    def test_no_image_becomes_published_with_a_file_that_is_not_verified(self, data: st.DataObject) -> None:
        _, previous, verified, _, assembly = self.run_it(data)
        self.assertEqual(set(assembly.manifest.blobs) - verified, assembly.damaged)
        for image in assembly.manifest.images:
            if image not in previous.images:
                self.assertLessEqual({file.sha256 for file in image.files}, verified)

    @settings(deadline=None, max_examples=80)
    @given(st.data())
    def test_no_image_goes_away_without_a_reason(self, data: st.DataObject) -> None:
        found, previous, _, _, assembly = self.run_it(data)
        for image in previous.images:
            if image.key not in assembly.manifest.by_key:
                self.assertTrue(may_go(image, found), image)

    @settings(deadline=None, max_examples=80)
    @given(st.data())
    def test_a_source_that_failed_loses_no_image(self, data: st.DataObject) -> None:
        found, previous, _, planned, _ = self.run_it(data)
        assembly = assemble(planned, previous, everything(planned, previous), {})
        ranks = {end.source.url: end.source.rank for end in found}
        for end in found:
            if isinstance(end, SourceFailed):
                for image in previous.images:
                    if image.source == end.source.url and end.source.selects(image):
                        now = assembly.manifest.by_key[image.key]
                        if now != image:
                            self.assertLess(ranks[now.source], end.source.rank)

    @settings(deadline=None, max_examples=80)
    @given(st.data())
    def test_every_published_image_is_accounted_for_exactly_once(self, data: st.DataObject) -> None:
        _, previous, _, planned, _ = self.run_it(data)
        for key in previous.by_key:
            self.assertEqual(sum(key in part for part in (planned.wanted, planned.kept, planned.removed)), 1)
        self.assertFalse(set(planned.wanted) & (set(planned.kept) | set(planned.removed)))
        self.assertLessEqual(set(planned.no_fallback), set(planned.wanted))
        self.assertTrue(all({**planned.kept, **planned.removed, **planned.no_fallback}.values()))

    @settings(deadline=None, max_examples=80)
    @given(st.data())
    def test_the_changes_are_exactly_the_difference_each_with_a_reason(self, data: st.DataObject) -> None:
        _, previous, _, _, assembly = self.run_it(data)
        before, after = previous.by_key, assembly.manifest.by_key
        expected: set[tuple[str, Image]] = set()
        for key in {*before, *after}:
            if key not in after:
                expected.add(("removed", before[key]))
            elif key not in before:
                expected.add(("added", after[key]))
            elif before[key] != after[key]:
                expected.add(("changed", after[key]))
        changes = [change for change in assembly.changes if change.kind != "kept"]
        self.assertEqual({(change.kind, change.image) for change in changes}, expected)
        self.assertEqual(len(changes), len(expected))
        self.assertTrue(all(change.reason for change in assembly.changes))
        for change in assembly.changes:
            if change.kind == "kept":
                self.assertEqual(after[change.image.key], before[change.image.key])

    @settings(deadline=None, max_examples=80)
    @given(st.data())
    def test_the_order_in_which_sources_were_read_does_not_matter(self, data: st.DataObject) -> None:
        found, previous, verified, planned, assembly = self.run_it(data)
        other = plan(data.draw(st.permutations(found)), previous)
        self.assertEqual(other, planned)
        self.assertEqual(list(other.wanted), list(planned.wanted))
        self.assertEqual(assemble(other, previous, verified, {}), assembly)

    @settings(deadline=None, max_examples=80)
    @given(st.data())
    def test_the_preferred_source_is_used_wherever_two_offer_an_image(self, data: st.DataObject) -> None:
        found, _, _, planned, _ = self.run_it(data)
        ranks: dict[ImageKey, list[tuple[int, int, str]]] = {}
        for end in found:
            for offer in end.images if isinstance(end, SourceRead) else ():
                if end.source.selects(offer.image):
                    ranks.setdefault(offer.image.key, []).append(end.source.rank)
        for key, offer in planned.wanted.items():
            self.assertEqual(offer.image.source, min(ranks[key])[2])
        self.assertLessEqual(set(ranks), {*planned.wanted, *planned.kept})

    @settings(deadline=None, max_examples=80)
    @given(st.data())
    def test_planning_again_from_what_was_assembled_changes_nothing(self, data: st.DataObject) -> None:
        found, _, verified, _, assembly = self.run_it(data)
        again = assemble(plan(found, assembly.manifest), assembly.manifest, verified, {})
        self.assertEqual(again.manifest, assembly.manifest)
        self.assertEqual({change.kind for change in again.changes} - {"kept"}, set())

    @settings(deadline=None, max_examples=80)
    @given(st.data())
    def test_when_all_is_well_what_is_offered_is_what_is_published(self, data: st.DataObject) -> None:
        found = [
            a_read(end.source, *(offer.image for offer in end.images))
            for end in data.draw(ends())
            if isinstance(end, SourceRead)
        ]
        previous = data.draw(manifests)
        planned = plan(found, previous)
        assembly = assemble(planned, previous, everything(planned), {})
        offered = {
            offer.image.key for end in found for offer in end.images if end.source.selects(offer.image)
        }  # fmt: skip
        self.assertEqual(set(assembly.manifest.by_key), offered)
        self.assertEqual(set(assembly.manifest.images), {offer.image for offer in planned.wanted.values()})
        self.assertEqual((assembly.problems, planned.kept), ((), {}))

    @settings(deadline=None, max_examples=80)
    @given(st.data())
    def test_everything_that_may_be_published_is_among_what_is_to_be_verified(self, data: st.DataObject) -> None:
        _, previous, _, planned, assembly = self.run_it(data)
        blobs = planned.blobs(previous)
        self.assertLessEqual(set(assembly.manifest.blobs.items()), set(blobs.items()))


class RemovalTests(SynchronousTestCase):
    """Each reason for which an image goes away, and what is no reason."""

    def setUp(self) -> None:
        self.image = an_image()
        self.previous = Manifest([self.image])

    def removed(self, *found: End) -> str:
        """The image is removed; why."""
        planned = plan(found, self.previous)
        assembly = assemble(planned, self.previous, everything(planned, self.previous), {})
        self.assertEqual(assembly.manifest, EMPTY)
        [change] = assembly.changes
        self.assertEqual((change.kind, change.image), ("removed", self.image))
        self.assertEqual(assembly.problems, ())
        return change.reason

    def kept(self, *found: End) -> str:
        """The image is kept; why."""
        planned = plan(found, self.previous)
        assembly = assemble(planned, self.previous, everything(planned, self.previous), {})
        self.assertEqual(assembly.manifest, self.previous)
        [change] = assembly.changes
        self.assertEqual((change.kind, change.image), ("kept", self.image))
        return change.reason

    def test_its_source_was_removed(self) -> None:
        self.assertEqual(self.removed(), "the source http://a.example/ was removed")
        self.assertIn("was removed", self.removed(a_read(a_source(URLS[1]))))

    def test_a_source_that_was_pointed_elsewhere_still_answers_for_what_it_gave_before(self) -> None:
        moved = evolve(a_source(URLS[1]), former=("http://a.example/",))
        self.assertIn("could not be read: timed out", self.kept(SourceFailed(moved, "timed out")))
        self.assertIn("of " + URLS[1], self.removed(a_read(moved)))
        # A source that is called so now is the one that answers.
        gone = self.removed(SourceFailed(moved, "timed out"), a_read(a_source()))
        self.assertIn("c:one of http://a.example/, updated", gone)

    def test_nobody_selects_it_any_more(self) -> None:
        reason = "no selection of http://a.example/ asks for it any more"
        self.assertEqual(self.removed(a_read(a_source(releases=["jammy"]), self.image)), reason)
        self.assertEqual(self.removed(a_read(a_source(releases=[]))), reason)

    def test_nobody_selects_it_any_more_although_its_source_failed(self) -> None:
        self.assertIn("no selection", self.removed(SourceFailed(a_source(releases=["jammy"]), "timed out")))

    def test_its_document_no_longer_lists_it(self) -> None:
        self.assertEqual(
            self.removed(a_read(a_source())),
            "c:one of http://a.example/, updated 2026-03-04 12:00:00 UTC, no longer lists it",
        )

    def test_the_index_no_longer_lists_its_document(self) -> None:
        read = SourceRead(a_source(), (), documents=(DocumentSeen("index", NOW, digest("")),))
        self.assertEqual(self.removed(read), "the index of http://a.example/ no longer lists c:one")

    def test_a_source_that_failed_is_no_reason(self) -> None:
        reason = self.kept(SourceFailed(a_source(), "no route to host"))
        self.assertEqual(reason, "http://a.example/ could not be read: no route to host")

    def test_another_password_makes_no_other_source(self) -> None:
        source = evolve(a_source(), url="http://someone:secret@a.example/")
        reason = self.kept(SourceFailed(source, "401 Unauthorized"))
        self.assertEqual(reason, "http://a.example/ could not be read: 401 Unauthorized")

    def test_a_document_that_failed_is_no_reason(self) -> None:
        self.assertEqual(
            self.kept(a_read(a_source(), failed=["c:one"])),
            "c:one of http://a.example/ could not be used: it is not JSON",
        )
        self.assertIn("no longer lists it", self.removed(a_read(a_source(), failed=["c:two"])))

    def test_an_entry_that_cannot_be_used_is_no_reason(self) -> None:
        for broken in (
            Broken("c:one", "p:noble", "20260202", None, "squashfs: it has no 'sha256'"),
            Broken("c:two", "p:other", "20260202", self.image.key, "squashfs: it has no 'sha256'"),
        ):
            self.assertIn(
                "cannot be used: squashfs: it has no 'sha256'", self.kept(a_read(a_source(), broken=[broken]))
            )
        elsewhere = Broken("c:two", "p:noble", "20260202", None, "x")
        self.removed(a_read(a_source(), broken=[elsewhere]))

    def test_damage_of_the_region_s_own_files_removes_no_image_and_is_a_problem(self) -> None:
        planned = plan([SourceFailed(a_source(), "no route to host")], self.previous)
        verified = everything(self.previous) - {self.image.files[1].sha256}
        assembly = assemble(planned, self.previous, verified, {})
        self.assertEqual((assembly.manifest, assembly.damaged), (self.previous, {self.image.files[1].sha256}))
        [change], [problem] = assembly.changes, assembly.problems
        self.assertEqual(change.kind, "kept")
        self.assertIn("the region's own copy is missing or damaged (squashfs)", change.reason)
        self.assertIn("no route to host", change.reason)
        self.assertEqual((problem.severity, problem.product, problem.file), ("error", "p:noble", "squashfs"))


class CompletionTests(SynchronousTestCase):
    """A new version is published whole, or the old one stays."""

    def setUp(self) -> None:
        self.old = an_image()
        self.new = an_image(version="20260202")
        self.previous = Manifest([self.old])
        self.failed = self.new.files[0].sha256
        self.failures = {self.failed: "its sha256 is 12…, not 34…"}

    def assemble(self, *found: End, failing: bool = True) -> Assembly:
        """What comes of it, when the new kernel could not be fetched."""
        planned = plan(found, self.previous)
        verified = everything(planned, self.previous) - ({self.failed} if failing else set())
        return assemble(planned, self.previous, verified, self.failures)

    def test_the_old_version_stays_and_the_problem_names_product_version_and_file(self) -> None:
        assembly = self.assemble(a_read(a_source(), self.new))
        self.assertEqual(assembly.manifest, self.previous)
        self.assertEqual(
            assembly.problems,
            (Problem("error", URLS[0], "p:noble", "20260202", "boot-kernel", "its sha256 is 12…, not 34…"),),
        )
        [change] = assembly.changes
        self.assertEqual((change.kind, change.image), ("kept", self.old))
        self.assertEqual(
            change.reason,
            "version 20260202 of p:noble could not be completed: boot-kernel: its sha256 is 12…, not 34…",
        )

    def test_every_file_that_is_missing_is_a_problem(self) -> None:
        planned = plan([a_read(a_source(), self.new)], EMPTY)
        assembly = assemble(planned, EMPTY, set(), self.failures)
        self.assertEqual(assembly.manifest, EMPTY)
        self.assertEqual([problem.file for problem in assembly.problems], ["boot-kernel", "squashfs"])
        self.assertEqual(assembly.problems[1].reason, "it was not fetched")

    def test_one_incomplete_image_does_not_hold_up_another(self) -> None:
        other = an_image("jammy")
        assembly = self.assemble(a_read(a_source(), self.new, other))
        self.assertEqual(assembly.manifest, Manifest([self.old, other]))

    def test_the_old_version_does_not_stay_if_its_source_was_removed(self) -> None:
        new = an_image(version="20260202", url=URLS[1])
        assembly = self.assemble(a_read(a_source(URLS[1]), new))
        self.assertEqual(assembly.manifest, EMPTY)
        self.assertEqual([change.reason for change in assembly.changes], ["the source http://a.example/ was removed"])
        self.assertEqual(len(assembly.problems), 1)

    def test_the_old_version_stays_also_if_the_region_s_copy_is_damaged_for_racks_may_hold_it(self) -> None:
        planned = plan([a_read(a_source(), self.new)], self.previous)
        assembly = assemble(planned, self.previous, {self.old.files[0].sha256}, self.failures)
        self.assertEqual((assembly.manifest, assembly.damaged), (self.previous, {self.old.files[1].sha256}))
        self.assertEqual([problem.version for problem in assembly.problems], ["20260202", "20260202", "20260101"])

    def test_a_complete_new_version_takes_over(self) -> None:
        assembly = self.assemble(a_read(a_source(), self.new), failing=False)
        self.assertEqual(assembly.manifest, Manifest([self.new]))
        [change] = assembly.changes
        self.assertEqual((change.kind, change.reason), ("changed", "version 20260202 instead of 20260101"))

    def test_new_content_under_an_old_version_is_a_change(self) -> None:
        assembly = self.assemble(a_read(a_source(), an_image(salt="other")), failing=False)
        [change] = assembly.changes
        self.assertEqual((change.kind, change.reason), ("changed", "version 20260101 has new content: boot-kernel"))

    def test_another_description_of_the_same_content_is_a_change(self) -> None:
        assembly = self.assemble(a_read(a_source(), an_image(support_eol="2031")), failing=False)
        [change] = assembly.changes
        self.assertEqual((change.kind, change.reason), ("changed", "the same content with another description"))

    def test_the_same_again_is_no_change(self) -> None:
        assembly = self.assemble(a_read(a_source(), self.old), failing=False)
        self.assertEqual((assembly.manifest, assembly.changes), (self.previous, ()))


class PriorityTests(SynchronousTestCase):
    """Several sources that offer the same image."""

    def setUp(self) -> None:
        self.high, self.low = a_source(URLS[1], priority=10), a_source(URLS[0], priority=1)
        self.from_high, self.from_low = an_image(url=URLS[1]), an_image(url=URLS[0], version="20260202")

    def published(self, previous: Manifest, *found: End) -> Manifest:
        """What is published when all can be fetched."""
        planned = plan(found, previous)
        return assemble(planned, previous, everything(planned, previous), {}).manifest

    def test_the_higher_priority_wins_even_with_an_older_version(self) -> None:
        found = [a_read(self.low, self.from_low), a_read(self.high, self.from_high)]
        self.assertEqual(self.published(EMPTY, *found), Manifest([self.from_high]))

    def test_among_equal_priorities_the_source_that_was_added_first_wins(self) -> None:
        found = [a_read(a_source(URLS[1]), self.from_high), a_read(a_source(URLS[0]), self.from_low)]
        self.assertEqual(self.published(EMPTY, *found), Manifest([self.from_low]))

    def test_an_image_is_kept_while_its_preferred_source_fails_though_another_offers_it(self) -> None:
        found: list[End] = [a_read(self.low, self.from_low), SourceFailed(self.high, "timed out")]
        self.assertEqual(self.published(Manifest([self.from_high]), *found), Manifest([self.from_high]))

    def test_a_preferred_source_takes_over_while_another_fails(self) -> None:
        found: list[End] = [SourceFailed(self.low, "timed out"), a_read(self.high, self.from_high)]
        self.assertEqual(self.published(Manifest([self.from_low]), *found), Manifest([self.from_high]))

    def test_what_a_failing_source_never_gave_is_taken_from_another(self) -> None:
        found: list[End] = [a_read(self.low, self.from_low), SourceFailed(self.high, "timed out")]
        self.assertEqual(self.published(EMPTY, *found), Manifest([self.from_low]))

    def test_an_image_that_its_source_dropped_is_taken_from_another(self) -> None:
        found = [a_read(self.low, self.from_low), a_read(self.high)]
        planned = plan(found, Manifest([self.from_high]))
        assembly = assemble(planned, Manifest([self.from_high]), everything(planned), {})
        self.assertEqual(assembly.manifest, Manifest([self.from_low]))
        self.assertEqual(
            [change.reason for change in assembly.changes],
            ["version 20260202 instead of 20260101; from http://a.example/ instead of http://b.example/"],
        )


class DownloadTests(SynchronousTestCase):
    """What a plan says is to be fetched."""

    def test_each_content_is_there_once_with_its_url_size_and_name(self) -> None:
        one, two = an_image(), evolve(an_image(salt="other", url=URLS[1]), subarch="hwe")
        planned = plan([a_read(a_source(), one), a_read(a_source(URLS[1]), two)], EMPTY)
        self.assertEqual(len(planned.downloads), 3)
        first = planned.downloads[0]
        self.assertEqual((first.sha256, first.size), (one.files[0].sha256, one.files[0].size))
        self.assertEqual(first.url, URLS[0] + first.sha256)
        self.assertEqual(first.label, "ubuntu/noble amd64/ga/generic (stable) 20260101 boot-kernel")

    def test_nothing_is_fetched_for_what_is_only_kept(self) -> None:
        previous = Manifest([an_image()])
        planned = plan([SourceFailed(a_source(), "no")], previous)
        self.assertEqual(planned.downloads, ())
        self.assertEqual(planned.blobs(previous), previous.blobs)

    def test_a_content_that_is_said_to_have_two_sizes_is_believed_of_neither(self) -> None:
        one = an_image()
        file = one.files[1]
        liar = evolve(an_image("jammy"), files=(ImageFile("squashfs", "squashfs", file.sha256, file.size + 1),))
        planned = plan([a_read(a_source(), one, liar)], EMPTY)
        self.assertEqual(dict(planned.wanted), {})
        self.assertEqual({problem.product for problem in planned.problems}, {"p:noble", "p:jammy"})
        published = plan([a_read(a_source(), one, liar)], Manifest([one]))
        self.assertEqual(set(published.wanted), {one.key})
        self.assertIn(f"{file.size + 1} bytes long, elsewhere it is {file.size}", published.problems[0].reason)

    def test_the_problems_of_every_source_are_passed_on(self) -> None:
        problem = Problem("warning", URLS[0], "p", "v", "f", "r")
        planned = plan([SourceFailed(a_source(), "no", (problem,))], EMPTY)
        self.assertEqual(planned.problems, (problem,))
