"""Fakes of what the API is made over: keys, racks, generations and an importer, in memory."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from attrs import define, evolve, field, frozen
from twisted.internet.defer import Deferred

from rack.systems.describing import describe, validate
from rack.wire import described
from region.answers.combine import Catalogue
from region.answers.past import Kernel, Past, Step
from region.api.keys import ApiKey
from region.license_keys import LicenseKey
from region.processes import Connection, Connections
from region.racks import RackRefused
from rpc.commands import DescribeRelease, ListImages, ValidateLicenseKey
from rpc.manifest import Manifest
from rpc.outcomes import Answered, Outcome

EPOCH = 1_780_000_000.0
NOW = datetime.fromtimestamp(EPOCH, UTC)


class Keys:
    """A store of keys that has one, ``consumer:token:secret``."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, str], ApiKey] = {}
        self.looked_up: list[tuple[str, str]] = []
        self.pending: Deferred[None] | None = None
        self.error: Exception | None = None
        self.add()

    @staticmethod
    def default() -> ApiKey:
        return ApiKey("consumer", "token", "secret", "someone", NOW)

    def add(self) -> None:
        self.known["consumer", "token"] = self.default()

    async def find(self, consumer_key: str, token_key: str) -> ApiKey | None:
        self.looked_up.append((consumer_key, token_key))
        if self.pending is not None:
            await self.pending
        if self.error is not None:
            raise self.error
        return self.known.get((consumer_key, token_key))


@frozen
class Rack:
    """An enrolled rack."""

    system_id: str
    name: str
    version: str = "0.1.0"
    state: str = "ready"
    generation: int | None = None
    digest: str | None = None
    progress: Mapping[str, Any] = field(factory=dict)
    enrolled: datetime = NOW
    last_connected: datetime | None = NOW
    last_disconnected: datetime | None = None
    reported: datetime | None = NOW
    revoked: datetime | None = None


@define
class Link:
    """A link on which a rack answers with what it holds, or with an outcome; of releases with what its drivers say and
    ``description`` over that, or with an outcome; if it is ``slow``, when what it appends to that is fired."""

    state: str
    generation: int
    catalogue: Catalogue
    outcome: Outcome[Any] | None = None
    asks: int = 0
    pending: Deferred[None] | None = None
    description: Mapping[str, Any] | Outcome[Any] = field(factory=dict)
    described: list[tuple[str, str]] = field(factory=list)
    slow: list[Deferred[None]] | None = None
    judgement: Mapping[str, Any] | None = None
    judged: list[str] = field(factory=list)

    async def ask(self, command: Any, *, deadline: float | None = None, **arguments: Any) -> Outcome[Any]:
        self.asks += command is ListImages
        if self.pending is not None:
            await self.pending
        if self.outcome is not None:
            return self.outcome
        if command is DescribeRelease:
            self.described.append((arguments["os"], arguments["release"]))
            if self.slow is not None:
                self.slow.append(Deferred())
                await self.slow[-1]
            if isinstance(self.description, Mapping):
                return Answered({**described(describe(self.catalogue.manifest, **arguments)), **self.description})
            return self.description
        if command is ValidateLicenseKey:
            self.judged.append(arguments["key"])
            outcome, reason = validate(self.catalogue.manifest, **arguments)
            return Answered(self.judgement or {"outcome": outcome, "reason": reason})
        manifest = self.catalogue.manifest
        value = {"state": self.state, "generation": self.generation, "digest": manifest.digest}
        if not manifest.images:
            value["digest"] = ""
        elif manifest.digest not in (arguments["known_digest"], arguments.get("newest_digest")):
            value["inventory"] = manifest.canonical
        return Answered(value, 0.001 * self.asks)


class Racks:
    """The enrolled racks; each has a link unless it is taken away."""

    def __init__(self) -> None:
        self.racks: dict[str, Rack] = {}
        self.links: dict[str, Link] = {}
        self.ended: dict[str, float] = {}
        self.told: list[str] = []
        self.forgotten: dict[str, bool] = {}
        self.cut_off: dict[str, Rack] = {}

    def add(self, system_id: str, catalogue: Catalogue, generation: int = 1, state: str = "ready") -> Link:
        self.racks[system_id] = Rack(system_id, f"rack-{system_id}", generation=generation, digest=catalogue.digest)
        self.links[system_id] = Link(state, generation, catalogue)
        return self.links[system_id]

    def enrolled(self) -> Mapping[str, Rack]:
        return self.racks

    def link_of(self, system_id: str) -> Link | None:
        return self.links.get(system_id)

    def not_connected_since(self, system_id: str) -> float | None:
        return self.ended.get(system_id)

    async def connections(self) -> Mapping[str, Connections]:
        return {
            system_id: Connections(
                (Connection("1", "region", "machine", NOW, "192.0.2.1:4"),) if system_id in self.links else ()
            )
            for system_id in self.racks
        }

    @property
    def store(self) -> Racks:
        return self

    async def forget(self, system_id: str) -> bool:
        self.links.pop(system_id, None)
        return self.forgotten.setdefault(system_id, system_id in self.racks)

    def revoked(self) -> Mapping[str, Rack]:
        return self.cut_off

    async def revoke(self, system_id: str) -> bool:
        self.links.pop(system_id, None)
        if system_id not in self.racks:
            return False
        self.cut_off[system_id] = evolve(self.racks.pop(system_id), revoked=NOW)
        return True

    async def rename(self, system_id: str, name: str) -> bool:
        if name == "taken":
            raise RackRefused("another rack is named 'taken'")
        self.racks[system_id] = evolve(self.racks[system_id], name=name)
        return True

    async def refresh(self) -> None:
        for system_id in self.forgotten:
            self.racks.pop(system_id, None)
            self.cut_off.pop(system_id, None)

    def consider(self, system_id: str, *, even_if_in_step: bool = False) -> bool:
        self.told.append(system_id)
        return system_id in self.links


@frozen
class Generation:
    """A generation."""

    number: int
    manifest: Manifest
    published: datetime = NOW

    @property
    def digest(self) -> str:
        return self.manifest.digest


class Generations:
    """The generations that were published, as :class:`region.images.store.GenerationStore` tells of them."""

    def __init__(self) -> None:
        self.published: list[Generation] = []

    def publish(self, manifest: Manifest) -> None:
        self.published.append(Generation(len(self.published) + 1, manifest))

    async def current(self) -> Generation | None:
        return self.published[-1] if self.published else None

    async def listings(self) -> Mapping[int, frozenset[tuple[str, str, str]]]:
        return {
            generation.number: frozenset((image.os, image.release, image.arch) for image in generation.manifest.images)
            for generation in self.published
        }


class Records:
    """What became of the releases of ``generations``, each of which was published an hour after the one before.

    ``reasons`` says why a generation changed what it did; ``kept`` what it kept all the same, by the image's version.
    """

    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        self.reasons: dict[int, str] = {}
        self.kept: dict[int, str] = {}
        self.error: Exception | None = None

    async def past(self, os: str, release: str, current: int | None) -> Past:
        if self.error is not None:
            raise self.error
        assert "\x00" not in os + release, "PostgreSQL refuses that"
        steps: list[Step] = []
        listed: dict[int, frozenset[Kernel]] = {}
        before: Mapping[Kernel, str] = {}
        for generation in self._generations.published:
            number = generation.number
            if current is None or number > current:
                continue
            now = {
                Kernel.of(image): image.version
                for image in generation.manifest.images
                if (image.os, image.release) == (os, release)
            }
            listed[number] = frozenset(now)
            at, reason = EPOCH + 3600.0 * number, self.reasons.get(number, "as upstream has it")
            for kernel in sorted({*now, *before}):
                kind = "added" if kernel not in before else "changed" if kernel in now else "removed"
                if kind != "changed" or now[kernel] != before[kernel]:
                    version = now.get(kernel) or before[kernel]
                    steps.append(Step(number, at, kind, kernel, version, reason))
                elif number in self.kept:
                    steps.append(Step(number, at, "kept", kernel, now[kernel], self.kept[number]))
            before = now
        return Past(tuple(steps), listed)


class LicenseKeys:
    """A store of license keys, in memory."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str], LicenseKey] = {}

    async def list(self) -> list[LicenseKey]:
        return [self.kept[key] for key in sorted(self.kept)]

    async def get(self, osystem: str, distro_series: str) -> LicenseKey | None:
        return self.kept.get((osystem, distro_series))

    async def add(self, key: LicenseKey) -> bool:
        return self.kept.setdefault((key.osystem, key.distro_series), key) is key

    async def replace(self, key: LicenseKey) -> bool:
        had = (key.osystem, key.distro_series) in self.kept
        self.kept |= {(key.osystem, key.distro_series): key} if had else {}
        return had

    async def delete(self, osystem: str, distro_series: str) -> bool:
        return self.kept.pop((osystem, distro_series), None) is not None


async def ask_each(
    command: Any, asks: Mapping[str, tuple[Any, Mapping[str, Any]]], *, deadline: float
) -> Mapping[str, Outcome[Any]]:
    """As :func:`rpc.rounds.ask_all`, over fake links."""
    waiting = {
        name: Deferred.fromCoroutine(_ask(link, command, deadline, arguments))
        for name, (link, arguments) in asks.items()
    }
    return {name: await each for name, each in waiting.items()}


async def _ask(link: Any, command: Any, deadline: float, arguments: Mapping[str, Any]) -> Outcome[Any]:
    outcome: Outcome[Any] = await link.ask(command, deadline=deadline, **arguments)
    return outcome
