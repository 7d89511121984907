"""A world: two upstreams, a region (or none, while it is down), racks, and clients; and all that may happen to them."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from attrs import define, field
from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import ILogObserver, globalLogPublisher
from twisted.python.failure import Failure
from twisted.web.server import Site
from zope.interface import provider

from region.answers.combine import Target
from region.database import DatabaseUnavailable
from region.images.sources import NoSuchSource, SourceInvalid, SourceStore
from region.upstream import Selection
from rpc.manifest import Manifest, parse_manifest
from tests import streams
from tests.streams import Stream
from tests.world.database import Observer
from tests.world.questions import Moment, Question, Reading, SiteConnection
from tests.world.rack import ModelRack
from tests.world.region import REGION, ModelRegion
from tests.world.turns import Turns

CHANGES: Final[tuple[Callable[..., None], ...]] = (
    streams.new_version, streams.same_version, streams.drop_product, streams.corrupt_file, streams.truncate_file,
    streams.missing_file,
)  # fmt: skip
"""All kinds of changes that upstreams make, as ``mkstream change`` has them."""

OFFERED: Final = (
    (("noble", "amd64"), ("noble", "arm64"), ("jammy", "amd64")),
    (("noble", "amd64"), ("focal", "amd64")),
)  # fmt: skip
"""What each upstream offers at first; the first is the one that is preferred."""

RECONNECTING: Final = 0.5
"""How likely racks without a link are to connect again whenever something goes on."""

ASKING: Final = 0.7
"""How likely somebody asks something in the midst of what goes on."""

RECOVERY_TURNS: Final = 60
"""Seconds that a world may take to be as it should be, once it is left alone."""

TARGETS: Final = tuple(Target("ubuntu", *each) for each in sorted({*OFFERED[0], *OFFERED[1]}))
UNHEARD_OF: Final = Target("ubuntu", "warty", "amd64")
NARROW: Final = Selection("ubuntu", "noble")
WIDE: Final = Selection("*", "*")


@define(eq=False)
class Upstream:
    """An upstream, and what the region was told of it: whether it ``is_wanted``, and with which selection.

    ``dropped`` are the (release, arch) that it ever dropped, ``was_narrowed`` is whether its selection ever was
    :data:`NARROW`, and ``was_removed`` whether it ever was no source.
    """

    stream: Stream
    offered: tuple[tuple[str, str], ...]
    priority: int
    is_wanted: bool = True
    selection: Selection = WIDE
    dropped: set[tuple[str, str]] = field(factory=set)
    was_narrowed: bool = False
    was_removed: bool = False

    def products(self) -> dict[str, Any]:
        """What it lists at this moment, by name."""
        return self.stream.products()


class World:
    """Everything. The methods are what may happen; nothing of it goes further than it must."""

    def __init__(self, dsn: str, root: Path) -> None:
        self.turns = Turns()
        self.root = root
        self.dsn = dsn
        self.observer = Observer(dsn)
        self.failures: list[str] = []
        self.region: ModelRegion | None = None
        self.racks: dict[str, ModelRack] = {}
        self.questions: list[Question] = []
        self.readings: list[Reading] = []
        self.generations: dict[int, Manifest] = {}
        self.disturbances = 0
        self._joined = 0
        self.upstreams = [
            Upstream(self._stream(f"upstream-{number}", offered), offered, 2 - number)
            for number, offered in enumerate(OFFERED)
        ]
        globalLogPublisher.addObserver(self._logged)
        self.start_region()
        self.set_up_sources()
        self.settle()

    def _stream(self, name: str, offered: tuple[tuple[str, str], ...]) -> Stream:
        stream = Stream(self.root / name)
        for release, arch in offered:
            files = {each: streams.content(f"{name} {release} {arch} {each}") for each in ("boot-kernel", "squashfs")}
            stream.add(release, arch, files=files)
        stream.add_loader()
        return stream.write()

    @provider(ILogObserver)
    def _logged(self, event: Any) -> None:
        failure: Failure | None = event.get("log_failure")
        if failure is not None:
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
        self.turns.go(chance.randrange(10), chance)
        if count and self.region is not None and chance.random() < ASKING:
            rack = chance.choice(["", "", *sorted(self.racks)])
            self.ask(chance.choice([None, *TARGETS, UNHEARD_OF]), chance.choice(["any", "all"]), rack)
        self.turns.go(count - count // 2, chance)

    def notify(self) -> None:
        """Have the notifications of what was committed until now arrive."""
        self.turns.follow()
        if self.region is not None and self.region.database._listener._connection is not None:
            self.region.database.deliver_until(self.observer.fence())

    def settle(self) -> None:
        """Let everything happen that needs no more time."""
        while True:
            self.turns.settle()
            self.notify()
            if not self.turns.pending():
                return

    def pass_time(self, seconds: float) -> None:
        """Let time pass."""
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
        products = upstream.products()
        if not products:
            return
        name = sorted(products)[product % len(products)]
        if how in (streams.missing_file, streams.corrupt_file, streams.truncate_file):
            _, items = max(products[name]["versions"].items())
            if not (upstream.stream.root / items["items"][min(items["items"])]["path"]).exists():
                return  # it is gone already
        if how is streams.drop_product:
            upstream.dropped.add((products[name]["release"], products[name]["arch"]))
        upstream.stream.change(how, name)

    def list_again(self, number: int, product: int) -> None:
        """Have an upstream list again what it offered at first, with other files."""
        upstream = self.upstreams[number]
        release, arch = upstream.offered[product % len(upstream.offered)]
        version = f"2027{len(upstream.stream.documents):04}.{int(upstream.stream.updated.timestamp())}"
        name = f"{number} {release} {arch} {version}"
        files = {each: streams.content(f"{name} {each}") for each in ("boot-kernel", "squashfs")}
        upstream.stream.add(release, arch, version, files)
        upstream.stream.updated += timedelta(minutes=1)
        upstream.stream.write()

    def break_upstream(self, number: int, how: str) -> None:
        """Have an upstream not be readable until it changes again, or is mended."""
        upstream = self.upstreams[number]
        directory = upstream.stream.root / "streams" / "v1"
        index, document = directory / "index.json", directory / f"{streams.IMAGES}.json"
        match how:
            case "gone":
                index.unlink(missing_ok=True)
            case "garbage":
                index.write_bytes(b"<html>Please log in</html>")
            case "document gone":
                document.unlink(missing_ok=True)
            case "document garbage":
                document.write_bytes(document.read_bytes()[:100] if document.exists() else b"{}")

    def mend_upstream(self, number: int) -> None:
        """Have it readable again."""
        self.upstreams[number].stream.write()

    # Region

    @property
    def needed_region(self) -> ModelRegion:
        """The region, which is up."""
        assert self.region is not None
        return self.region

    def site(self) -> Site | None:
        """The region's site, None while it is down."""
        return None if self.region is None or not self.region.is_up else self.region.site

    def start_region(self) -> None:
        """Start a region process."""
        self.region = ModelRegion(self.turns, self.dsn, self.root / "region", self._look)
        self.region.generations.subscribe(lambda generation: self.learn())
        self.turns.finish(Deferred.fromCoroutine(self.region.start()), owner=REGION)

    def _look(self) -> Moment:
        return Moment.now(self, self.needed_region)

    def stop_region(self) -> None:
        """Stop it; racks and clients lose their connections."""
        region = self.needed_region
        self.disturbances += 1
        for rack in self.racks.values():
            rack.cut()
        for question in self.questions:
            question.connection.hang_up()
        self.questions.clear()
        for reading in self.readings:
            reading.cut()
        self.readings.clear()
        self.turns.finish(Deferred.fromCoroutine(region.stop()), owner=REGION)
        self.turns.forget(REGION)
        self.region = None

    def request_import(self) -> None:
        """Ask for an import."""
        self.run(self.needed_region.importer.request())

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
        self.turns.finish(Deferred.fromCoroutine(self._set_up(self.needed_region.sources, *self.upstreams)))

    def change_source(self, number: int, *, is_wanted: bool, selection: Selection) -> None:
        """Have a source added, removed, or what it selects changed."""
        upstream = self.upstreams[number]
        upstream.is_wanted, upstream.selection = is_wanted, selection
        upstream.was_removed |= not is_wanted
        upstream.was_narrowed |= selection == NARROW
        self.run(self._set_up(self.needed_region.sources, upstream))

    @staticmethod
    async def _set_up(sources: SourceStore, *upstreams: Upstream) -> None:
        there = {source.url: source.id for source in await sources.list()}
        for upstream in upstreams:
            url, wanted = upstream.stream.url, upstream.selection
            if url not in there and upstream.is_wanted:
                await sources.create(url, allow_unsigned=True, priority=upstream.priority, selections=[wanted])
            elif url in there and not upstream.is_wanted:
                await sources.delete(there[url])
            elif url in there:
                for found in await sources.selections(there[url]):
                    await sources.update_selection(there[url], found.id, wanted)

    # Racks

    def join_rack(self) -> None:
        """Enrol a rack, and start it."""
        self._joined += 1
        system_id = f"rack{self._joined:02}"
        region = self.needed_region
        directory = self.root / system_id
        rack = self.racks[system_id] = ModelRack(self.turns, system_id, directory, self.site)
        self.turns.finish(Deferred.fromCoroutine(region.enrol(system_id, rack.name)), owner=REGION)
        rack.start()

    def leave_rack(self, system_id: str) -> None:
        """Stop a rack for good, and have the region forget it."""
        rack = self.racks.pop(system_id)
        self.disturbances += 1
        rack.stop()
        self.turns.forget(system_id)
        self.turns.finish(Deferred.fromCoroutine(self.needed_region.forget(system_id)), owner=REGION)

    def restart_rack(self, system_id: str) -> None:
        """Stop a rack and start it again, with the disk that it has."""
        self.disturbances += 1
        self.racks[system_id].stop()
        self.turns.forget(system_id)
        self.racks[system_id].start()

    def link_rack(self, system_id: str) -> None:
        """Have a rack connect, if it is not connected."""
        rack = self.racks[system_id]
        if rack.link is None and rack.is_ready and self.region is not None:
            linking = self.region.link(rack)
            linking.addErrback(lambda failure: rack.cut())

    def cut_rack(self, system_id: str) -> None:
        """Have a rack's connections end."""
        self.disturbances += 1
        self.racks[system_id].cut()

    def stall_rack(self, system_id: str, stalled: bool) -> None:
        """Have nothing pass on a rack's link, or let it pass again."""
        rack = self.racks[system_id]
        if rack.link is not None and rack.link[2].stalled != stalled:
            self.disturbances += 1
            rack.link[2].stalled = stalled

    # Clients

    def ask(self, target: Target | None, policy: str = "any", rack: str = "") -> None:
        """Ask the API for a release, or for all."""
        region = self.needed_region
        path = "releases/" if target is None else f"releases/{target.name}/"
        query = f"?policy={policy}" + (f"&arch={target.arch}" if target else "") + (f"&rack={rack}" if rack else "")
        question = Question.begun(self, region, target, policy, rack)
        question.connection = SiteConnection(region.site)
        question.connection.send("GET", path + query)
        self.questions.append(question)
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

    def recover(self) -> None:
        """Have all faults end, everybody connect, and leave them alone until nothing changes any more."""
        for number, upstream in enumerate(self.upstreams):
            for name in sorted(upstream.products()):
                upstream.stream.change(streams.new_version, name)
            self.mend_upstream(number)
        if self.region is None:
            self.start_region()
        for system_id, rack in self.racks.items():
            self.stall_rack(system_id, False)
            if rack.process is None:
                rack.start()
        self.settle()
        self.pass_time(5.0)  # questions that wait for racks that did not answer end
        self.settle()
        for system_id in self.racks:
            self.link_rack(system_id)
        self.set_up_sources()  # what was wanted last was not stored if the region ended, or something overtook it
        self.request_import()
        for _ in range(RECOVERY_TURNS):
            self.settle()
            if self._is_at_rest():
                return
            self.pass_time(1.0)

    def _is_at_rest(self) -> bool:
        region = self.needed_region
        if region.importer.is_busy or self.questions or self.readings:
            return False
        latest = region.generations.latest
        return latest is None or all(
            rack.process is not None and rack.process.store.inventory.holds(latest.number, latest.digest)
            for rack in self.racks.values()
        )

    def close(self) -> None:
        """End everything."""
        globalLogPublisher.removeObserver(self._logged)
        if self.region is not None:
            self.stop_region()
        for rack in self.racks.values():
            rack.stop()
        self.observer.close()
