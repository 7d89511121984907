"""What a region and a rack keep besides images, when they are killed or lose power at any step of writing it: the
authority, a rack's identity, and the events that wait for a region.

All steps are found by :mod:`tests.faults`, and each is the place of a kill and of a loss of power.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from attrs import evolve
from twisted.trial.unittest import SynchronousTestCase

from rack.eventfile import EventFile, Hole, Record, Recovered
from rack.identity import Identity, NotJoined, read_identity, write_identity
from region.authority_files import Keys, begin_change, finish_change, load_keys
from rpc.certificates import create_authority, is_issued_by, issue_rack, load_certificate, make_request, new_key
from rpc.events import Event
from tests.crashes import TALLY
from tests.examples import SOAK
from tests.faults import LOSSES, Crash, Disk, Loss

NOW = datetime(2026, 11, 30, tzinfo=UTC)
LATER = NOW + timedelta(days=800)
SOME: tuple[Loss, ...] = (Loss(-1, "lost"), Loss(0, "torn"), Loss(1, "zeroed"))
ENDS: tuple[Loss | None, ...] = (None, *(LOSSES if SOAK > 1 else SOME))


class StateTestCase(SynchronousTestCase):
    """A directory that is put back to what it was before each crash."""

    def setUp(self) -> None:
        base = Path(self.mktemp()).absolute()
        self.root, self.template = base / "state", base / "template"
        self.template.mkdir(parents=True)
        self.pid = os.getpid()
        self.patch(os, "getpid", lambda: self.pid)
        self.disk = Disk(self.root)
        self.disk.install(self.patch)
        self.addCleanup(self.disk.close)

    def crashes(self, work: Callable[[], Any], kind: str) -> Iterator[tuple[Any, str]]:
        """Do ``work`` with a crash at each step in turn, and at the end of it; each time give what it returned (None if
        it was cut) and where that was."""
        for end in ENDS:
            at = 1
            while True:
                shutil.rmtree(self.root, ignore_errors=True)
                shutil.copytree(self.template, self.root)
                self.disk.arm(at)
                result = None
                try:
                    result = work()
                except Crash:
                    self.assertTrue(self.disk.stopped)
                TALLY.injected(self.disk, f"{kind}: {'kill' if end is None else 'power'}")
                is_over = not self.disk.stopped
                where = f"{end} at {self.disk.met} after {self.disk.said[-5:]}"
                self.disk.restart()
                if end is not None:
                    self.disk.lose_power(end)
                for left in self.root.rglob(".*"):
                    os.utime(left, (0, 0))  # time goes by until somebody starts it again
                self.pid += 1
                yield result, where
                if is_over:
                    break
                at += 1
            self.assertGreater(at, 4)

    def keep(self) -> None:
        """What is there now is what there is before each crash from here on."""
        shutil.rmtree(self.template)
        shutil.copytree(self.root, self.template)


class AuthorityTests(StateTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.directory = self.root / "authority"

    def load(self, now: datetime = NOW) -> Keys:
        """As a start of the region does."""
        return load_keys(self.directory, "test", now)

    def check(self, where: str, now: datetime = NOW) -> Keys:
        """The region starts, has one authority that stays, a certificate by it, and no file besides."""
        keys = self.load(now)
        self.assertEqual(self.load(now), keys, where)
        self.assertTrue(is_issued_by(load_certificate(keys.region.certificate), load_certificate(keys.ca.certificate)))
        stems = ("ca", "region", *(("next",) if keys.next else ()))
        wanted = {f"{stem}.{end}" for stem in stems for end in ("key", "crt")}
        there = set(os.listdir(self.directory))
        self.assertLessEqual(wanted, there, where)
        self.assertLessEqual(there, wanted | {"next.key"}, where)
        return keys

    def begin(self) -> None:
        self.root.mkdir(exist_ok=True)
        self.load()
        self.keep()

    def test_a_first_start_leaves_one_authority_and_what_was_told_of_it_stays_true(self) -> None:
        for returned, where in self.crashes(self.load, "authority"):
            keys = self.check(where)
            if returned is not None:
                self.assertEqual(keys, returned, where)

    def test_renewing_the_region_s_certificate_never_costs_the_authority(self) -> None:
        self.begin()
        before = self.load()
        for _, where in self.crashes(lambda: self.load(LATER), "authority"):
            self.assertEqual(self.check(where, LATER).ca, before.ca, where)

    def test_a_change_of_the_authority_is_begun_or_not_and_ended_or_not(self) -> None:
        self.begin()
        before = self.load()
        for returned, where in self.crashes(lambda: begin_change(self.directory, "test", NOW), "authority"):
            keys = self.check(where)
            self.assertEqual(keys.ca, before.ca, where)
            if returned is not None:
                self.assertEqual(keys.next, returned[0].next, where)
        begin_change(self.directory, "test", NOW)
        self.keep()
        changing = self.load()
        for returned, where in self.crashes(lambda: finish_change(self.directory, "test", NOW), "authority"):
            keys = self.check(where)
            if returned is not None:
                self.assertEqual(keys, returned, where)
            self.assertIn((keys.ca, keys.next), ((changing.ca, changing.next), (changing.next, None)), where)


class IdentityTests(StateTestCase):
    def identity(self, name: str) -> Identity:
        authority = create_authority(NOW, "test")
        key = new_key()
        certificate = issue_rack(authority, make_request(key), "abc234", datetime.now(UTC))
        return Identity(
            system_id="abc234", name=name, region="region.example:5250", key=key.decode("ascii"),
            certificate=certificate.decode("ascii"), ca=authority.certificate.decode("ascii"),
        )  # fmt: skip

    def test_a_rack_has_the_old_identity_or_the_new_one_and_keeps_what_it_was_told_that_it_keeps(self) -> None:
        first, second = self.identity("one"), self.identity("two")
        directory = self.root / "identity"
        for written, where in self.crashes(lambda: write_identity(directory, first), "identity"):
            try:
                self.assertEqual(read_identity(directory), first, where)
            except NotJoined as error:
                self.assertIsNone(written, f"{where}: {error}")
                self.assertIn("has not joined", str(error))
        write_identity(directory, first)
        self.keep()
        for written, where in self.crashes(lambda: write_identity(directory, second), "identity"):
            self.assertIn(read_identity(directory), (second,) if written else (first, second), where)


class EventTests(StateTestCase):
    """The number of an event is used once; what was added is there; nothing that was confirmed comes back for good."""

    def setUp(self) -> None:
        super().setUp()
        self.added: list[int] = []
        self.marked = 0

    def open(self) -> tuple[EventFile, Recovered]:
        file = EventFile(self.root / "events", segment_bytes=400, now=lambda: 1.0)
        return file, file.open()

    def work(self) -> int:
        """A start, a few events, some of which the region confirms, and files of which nothing is needed."""
        file, found = self.open()
        sequence = found.sequence
        for _ in range(4):
            event = Event("", sequence, "Sync ended", 20, "x" * 100, 1.0)
            records = [Record(evolve(event, epoch=found.epoch, sequence=sequence + each), Hole()) for each in range(2)]
            file.append(records)
            self.added += [record.event.sequence for record in records]
            sequence += 2
            file.mark(sequence - 2, sequence)
            self.marked = sequence - 2
            file.trim(sequence - 2, Hole())
        return sequence

    def test_events_that_were_added_are_there_after_any_crash_and_no_number_is_used_twice(self) -> None:
        for _, where in self.crashes(self.work, "events"):
            added, self.added = self.added, []
            marked, self.marked = self.marked, 0
            _, found = self.open()
            there = [event.sequence for event in found.events]
            self.assertEqual(there, sorted(set(there)), where)
            self.assertLessEqual({each for each in added if each > found.acknowledged}, set(there), where)
            self.assertGreaterEqual(found.acknowledged, marked, where)
            self.assertGreater(found.sequence, max([0, *there, *added]), where)
            self.assertEqual(found.damaged, 0, where)
