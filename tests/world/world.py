"""A world: two upstreams, a region (or none, while it is down), racks, and clients; and all that may happen to them."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Final

from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import ILogObserver, globalLogPublisher
from twisted.python.failure import Failure
from twisted.web.server import Site
from zope.interface import provider

from rack.inspection import directory_of
from region.answers.combine import Target
from region.database import DatabaseUnavailable
from region.images.sources import NoSuchSource, SourceInvalid
from region.racks import RackRefused
from region.upstream import Selection
from rpc.manifest import Manifest, parse_manifest
from tests.examples import CHECKED
from tests.world.database import Observer
from tests.world.operators import Operators
from tests.world.questions import Moment, Question, Reading
from tests.world.rack import ModelRack
from tests.world.region import REGION, SECOND, ModelRegion
from tests.world.spoiling import Spoiled
from tests.world.turns import Turns
from tests.world.upstream import EVERYTHING, NARROW, set_up, upstreams

RECONNECTING: Final = 0.5
"""How likely racks without a link are to connect again whenever something goes on."""

ASKING: Final = 0.7
"""How likely somebody asks something in the midst of what goes on."""


class World:
    """Everything. The methods are what may happen; nothing of it goes further than it must.

    ``racks`` are those that are enrolled, ``strangers`` those that run on although they were revoked or forgotten, and
    ``dismissals`` who is to be that once more, because nobody knows whether it was done.

    :param two: whether there may be a second region process over the same database.
    """

    def __init__(self, dsn: str, root: Path, *, two: bool = False) -> None:
        self.two = two
        self.turns = Turns()
        self.root = root
        self.dsn = dsn
        self.observer = Observer(dsn)
        self.turns.on_time.append(self.observer.set_clock)
        self.failures: list[str] = []
        self.region: ModelRegion | None = None
        self.second: ModelRegion | None = None
        self.racks: dict[str, ModelRack] = {}
        self.strangers: dict[str, ModelRack] = {}
        self.dismissals: list[tuple[ModelRack, str]] = []
        self.operators = Operators(self)
        self.spoiled = Spoiled()
        self.heard: dict[ModelRegion, dict[str, float]] = {}
        self.questions: list[Question] = []
        self.readings: list[Reading] = []
        self.generations: dict[int, Manifest] = {}
        self.disturbances = 0
        self._joined = 0
        self._is_ending = False
        self.upstreams = upstreams(root)
        globalLogPublisher.addObserver(self._logged)
        self.start_region()
        self.set_up_sources()
        self.settle()

    @provider(ILogObserver)
    def _logged(self, event: Any) -> None:
        failure: Failure | None = event.get("log_failure")
        if failure is not None and not self._is_ending:
            self.failures.append(f"{event.get('log_format')}: {failure.getTraceback()}")

    def learn(self) -> None:
        """Read what was published since this was last called; :attr:`generations` has each one's manifest."""
        rows = self.observer.query(
            "SELECT number, digest, manifest FROM generation WHERE number > %s ORDER BY number",
            (len(self.generations),),
        )
        for number, digest, data in rows:
            assert number == len(self.generations) + 1, f"generation {number} follows {len(self.generations)}"
            self.generations[number] = parse_manifest(bytes(data), digest)

    # Time and chance

    def go(self, count: int, seed: int) -> None:
        """Let ``count`` things happen, which those are is decided by ``seed``."""
        chance = random.Random(seed)
        self.notify()
        if count and chance.random() < RECONNECTING:
            for system_id in self.racks:
                self.link_rack(system_id)
        self.turns.go(count // 2, chance)
        self.operators.attend()
        self.turns.go(chance.randrange(10), chance)
        if count and self.regions and chance.random() < ASKING:
            racks = chance.sample(sorted(self.racks), chance.choice([0, 0, min(1, len(self.racks)), len(self.racks)]))
            called = [chance.choice([system_id, self.racks[system_id].name]) for system_id in racks]
            policy, apart = chance.choice(["any", "all"]), chance.random() < 0.5
            self.ask(
                chance.choice([None, *EVERYTHING]), policy, *called, apart=apart, region=chance.choice(self.regions)
            )
        for _ in range(4):
            self.turns.go(count // 8, chance)
            self.operators.attend()

    @property
    def regions(self) -> list[ModelRegion]:
        """The region processes that are up."""
        return [region for region in (self.region, self.second) if region is not None]

    def notify(self) -> None:
        """Have the notifications of what was committed until now arrive."""
        self.turns.follow()
        for region in self.regions:
            if region.database._listener._connection is not None:
                region.database.deliver_until(self.observer.fence())

    def settle(self) -> None:
        """Let everything happen that needs no more time."""
        while True:
            self.turns.settle()
            self.notify()
            self.operators.attend()
            if not self.turns.pending():
                break
        if any(region.database._listener._connection is None for region in self.regions):
            return
        for stranger in self.strangers.values():
            if stranger.gone:
                stranger.gone.update(region.owner for region in self.regions)
        for rack in self.racks.values():
            self.learn_name(rack, is_settled=True)

    def learn_name(self, rack: ModelRack, *, is_settled: bool = False) -> None:
        """Learn what a rack is called now, if it is not being renamed; and that all know, if that is so."""
        row = self.observer.query("SELECT name FROM rack WHERE system_id = %s", (rack.system_id,))
        if rack.renaming or rack.known is not None or not row:
            return
        [[rack.name]] = row
        for name, (since, until) in rack.names.items():
            if until is None and name != rack.name:
                rack.names[name] = since, self.turns.steps
        if is_settled or not self.two:
            rack.known = self.turns.steps

    def called(self, name: str, since: int) -> set[str]:
        """The racks, and those that are none any more, that may have been called so at the step ``since`` or later."""
        everybody = {**self.strangers, **self.racks}
        return {system_id for system_id, rack in everybody.items() if rack.may_be_called(name, since)}

    def is_called(self, name: str, since: int) -> bool:
        """Whether there is a rack that every region process has known by that name (or system id) since then."""
        return any(
            name in (rack.system_id, rack.name) and rack.known is not None and rack.known <= since
            for rack in self.racks.values()
        )

    def pass_time(self, seconds: float) -> None:
        """Let time pass, in the database as well."""
        self.turns.pass_time(seconds)

    def run(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Begin what an operator asks for; it goes on as its lanes move."""

        def failed(failure: Failure) -> None:
            if not failure.check(DatabaseUnavailable, CancelledError, NoSuchSource, SourceInvalid):
                self.failures.append(failure.getTraceback())

        Deferred.fromCoroutine(coroutine).addErrback(failed)

    # Upstream

    def change_upstream(self, number: int, how: Callable[..., None], product: int) -> None:
        """Have an upstream change, well or badly."""
        upstream = self.upstreams[number]
        products = sorted(upstream.products())
        if products:
            upstream.change(how, products[product % len(products)])

    def trust_key(self, number: int) -> None:
        """Have the region told to trust another key of the upstream that signs."""
        upstream = self.upstreams[-1]
        upstream.trust_key(number)
        if self.region is not None:
            self.run(set_up(self.region.sources, upstream))

    # Region

    @property
    def needed_region(self) -> ModelRegion:
        """The region process that imports, which is up."""
        assert self.region is not None
        return self.region

    @property
    def blobs(self) -> Path:
        """The directory of the store of the region process that imports."""
        return self.root / REGION

    def site(self) -> Site | None:
        """The site of the region process that imports, None while it is down."""
        return None if self.region is None or not self.region.is_up else self.region.site

    def _start(self, owner: str) -> ModelRegion:
        return ModelRegion(self.turns, self.dsn, self.root / owner, self._look, owner=owner, is_alone=not self.two)

    def start_region(self) -> None:
        """Start the region process that imports."""
        self.region = self._start(REGION)
        self.region.generations.subscribe(lambda generation: self.learn())
        self._started(self.region)

    def start_second(self) -> None:
        """Start the second region process."""
        self.second = self._start(SECOND)
        self._started(self.second)

    def _started(self, region: ModelRegion) -> None:
        self.turns.finish(Deferred.fromCoroutine(region.start()), owner=region.owner)
        for stranger in self.strangers.values():
            if stranger.gone:
                stranger.gone.add(region.owner)  # it has read who is a rack after that was known

    def _look(self, region: ModelRegion) -> Moment:
        return Moment.now(self, region)

    def stop_region(self, *, kill: bool = False) -> None:
        """Stop, or kill, the region process that imports."""
        region = self.needed_region
        for reading in self.readings:
            reading.cut()
        self.readings.clear()
        self.region = None
        self._stop(region, kill)

    def stop_second(self, *, kill: bool = False) -> None:
        """Stop, or kill, the second region process."""
        assert self.second is not None
        region, self.second = self.second, None
        self._stop(region, kill)

    def _stop(self, region: ModelRegion, kill: bool) -> None:
        """End a region process; racks and clients lose their connections with it."""
        self.disturbances += 1
        for rack in (*self.racks.values(), *self.strangers.values()):
            if region.owner == REGION:
                rack.cut_all_but(SECOND)
            else:
                rack.cut_from(region.owner)
        for question in [each for each in self.questions if each.region is region]:
            self.questions.remove(question)
            question.connection.hang_up()
        self.operators.region_ended(region)
        self._is_ending = kill
        if kill:
            self.observer.end(region.kill())
        self.turns.finish(Deferred.fromCoroutine(region.stop()), owner=region.owner)
        self.turns.forget(region.owner)
        self._is_ending = False
        self.heard.pop(region, None)

    def request_import(self, region: ModelRegion | None = None) -> None:
        """Ask for an import, perhaps a region process that does not import itself."""
        self.run((region or self.needed_region).importer.request())

    def upload_while_importing(self, target: Target, before: int, seed: int) -> None:
        """Have a small image uploaded from beginning to end when an import has got so far."""
        chance = random.Random(seed)
        self.request_import()
        self.turns.go(before, chance)
        self.operators.upload(target, 2 * self.turns.steps, is_honest=True)
        for _ in range(8):
            self.turns.go(10, chance)
            self.operators.attend()

    def import_at_once(self) -> None:
        """Import from beginning to end while nothing else goes on."""
        self.request_import()
        self.turns.settle(REGION)
        self.notify()
        self.turns.settle(REGION)

    def cancel_import(self) -> None:
        """Cancel what is being imported."""
        self.run(self.needed_region.importer.cancel())

    def set_up_sources(self) -> None:
        """Have the sources as they are wanted, and wait for it."""
        self.turns.finish(Deferred.fromCoroutine(set_up(self.needed_region.sources, *self.upstreams)))

    def change_source(self, number: int, *, is_wanted: bool, selection: Selection) -> None:
        """Have a source added, removed, or what it selects changed."""
        upstream = self.upstreams[number]
        upstream.is_wanted, upstream.selection = is_wanted, selection
        upstream.was_removed |= not is_wanted
        upstream.was_narrowed |= selection == NARROW
        self.run(set_up(self.needed_region.sources, upstream))

    # Racks

    def join_rack(self) -> None:
        """Enrol a rack, and start it."""
        self._joined += 1
        system_id = f"rack{self._joined:02}"
        region = self.needed_region
        directory = self.root / system_id
        rack = self.racks[system_id] = ModelRack(self.turns, system_id, directory, self.site)
        try:
            self.turns.finish(Deferred.fromCoroutine(region.enrol(system_id, rack.name)), owner=REGION)
        except RackRefused:
            del self.racks[system_id]
            assert self.called(rack.name, 0), f"nobody else is called {rack.name}"
            return
        self.learn_name(rack)
        rack.start()

    def leave_rack(self, system_id: str) -> None:
        """Stop a rack for good, and have the region forget it."""
        rack = self.racks.pop(system_id)
        self.disturbances += 1
        rack.stop()
        self.turns.forget(system_id)
        self.turns.finish(Deferred.fromCoroutine(self.needed_region.forget(system_id)), owner=REGION)

    def dismiss_rack(self, system_id: str, how: str) -> None:
        """Revoke or forget a rack, which runs on."""
        rack = self.strangers[system_id] = self.racks.pop(system_id)
        self.disturbances += 1
        self.operators.dismiss(rack, how)

    def restart_rack(self, system_id: str) -> None:
        """Stop a rack and start it again, with the disk that it has."""
        self.disturbances += 1
        self.racks[system_id].stop()
        self.turns.forget(system_id)
        self.racks[system_id].start()

    def link_rack(self, system_id: str) -> None:
        """Have a rack connect with every region process that it is not connected with."""
        rack = self.racks[system_id]
        for region in self.regions:
            if region.owner not in rack.links and rack.is_ready:
                linking = region.link(rack)
                linking.addErrback(partial(self._not_linked, rack, region))

    @staticmethod
    def _not_linked(rack: ModelRack, region: ModelRegion, reason: Failure) -> None:
        rack.cut_from(region.owner)

    def link_stranger(self, number: int) -> None:
        """Have one that is no rack any more try to connect."""
        stranger = self.strangers[sorted(self.strangers)[number % len(self.strangers)]]
        for region in self.regions:
            if region.owner not in stranger.links and stranger.is_ready:
                was_gone = region.owner in stranger.gone
                linking = region.link(stranger)
                linking.addCallbacks(
                    partial(self._stranger_linked, stranger, was_gone), partial(self._not_linked, stranger, region)
                )
                linking.addErrback(lambda failure: self.failures.append(failure.getTraceback()))

    @staticmethod
    def _stranger_linked(stranger: ModelRack, was_gone: bool, result: object) -> None:
        CHECKED["strangers refused"] += 1
        assert not was_gone, f"{stranger.name} was revoked or forgotten, and was let in"

    def cut_rack(self, system_id: str) -> None:
        """Have a rack's connections end."""
        self.disturbances += 1
        self.racks[system_id].cut()

    def stall_rack(self, system_id: str, stalled: bool) -> None:
        """Have nothing pass on a rack's links, or let it pass again."""
        for linked in self.racks[system_id].links.values():
            if linked.wire.stalled != stalled:
                self.disturbances += 1
                linked.wire.stalled = stalled

    # Disks

    def spoil(self, system_id: str, how: str, number: int) -> None:
        """Have a disk spoil a file: the region's if ``system_id`` is "", else that of a rack."""
        root = self.blobs / "blobs" if not system_id else self.racks[system_id].directory / "cache" / "blobs"
        names = sorted(each.name for each in root.iterdir()) if root.exists() else []
        if names:
            name = names[number % len(names)]
            self.spoiled.spoil(root / name, how, name, self.turns.steps)

    def part_snapshot(self, system_id: str, number: int) -> None:
        """Have a file of a rack's snapshot be another one than that of its cache, with the same bytes or none."""
        rack = self.racks[system_id]
        if not rack.history:
            return
        base, manifest = (rack.directory / "current").resolve(), rack.inventory.manifest
        files = [(base / directory_of(image) / file.name, file) for image in manifest.images for file in image.files]
        there = [(path, file.sha256) for path, file in files if path.exists()]
        if there:
            path, sha256 = there[number % len(there)]
            self.spoiled.part(path, sha256, self.turns.steps, is_gone=number % 2 == 0)

    def verify(self, system_id: str) -> None:
        """Have all files of the region, or of a rack, hashed again."""
        if system_id:
            process = self.racks[system_id].process
            if process is not None and process.is_ready:
                process.verifier.request()
        else:
            self.needed_region.verifier.request()

    # Clients

    def ask(
        self,
        target: Target | None,
        policy: str = "any",
        *racks: str,
        apart: bool = True,
        region: ModelRegion | None = None,
    ) -> None:
        """Ask the API for a release, or for all."""
        asked = region or self.needed_region
        self.questions.append(Question.begun(self, asked, target, policy, racks, apart=apart))
        self.turns.follow()

    def read(self) -> None:
        """Begin to read the stream as a client does."""
        self.readings.append(Reading.begun(self))
        self.turns.follow()

    def lease(self, system_id: str) -> None:
        """Have something on a rack begin to read the current snapshot, or end that."""
        process = self.racks[system_id].process
        if process is None:
            return
        if process.leases:
            process.leases.pop().release()
        elif (lease := process.store.lease()) is not None:
            process.leases.append(lease)

    def close(self) -> None:
        """End everything."""
        globalLogPublisher.removeObserver(self._logged)
        if self.region is not None:
            self.stop_region()
        if self.second is not None:
            self.stop_second()
        for rack in (*self.racks.values(), *self.strangers.values()):
            rack.stop()
        self.observer.close()
