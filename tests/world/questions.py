"""What clients of a world ask, and what they may be told: of releases by the API, and the stream from end to end."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

from attrs import define, field, frozen
from twisted.internet.defer import CancelledError, Deferred
from twisted.python.failure import Failure

from rack.inventory import Inventory
from region.answers.combine import Target
from rpc.http_client import HttpClient
from rpc.http_errors import FetchError
from rpc.manifest import Manifest
from tests.examples import CHECKED
from tests.region.web import Connection
from tests.world.region import STREAM_URL, ModelRegion
from tests.world.spoiling import identity_of
from tests.world.turns import Wire
from tests.world.web import MemoryAgent

if TYPE_CHECKING:
    from tests.world.world import World

LIMIT: Final = 1 << 20


class SiteConnection(Connection):
    """A connection to a whole region."""

    def __init__(self, site: Any) -> None:
        self.attach(site)


def targets_of(manifest: Manifest) -> set[Target]:
    """What can be deployed from ``manifest``."""
    return {Target(image.os, image.release, image.arch) for image in manifest.images if not image.is_bootloader}


@frozen(eq=False)
class Moment:
    """What was the case at a time for a region process: how much of its history each rack had, which racks were
    registered on links that carry what is written, which it knew to have ``gone``, and when each was ``heard`` last."""

    at: float
    step: int
    disturbances: int
    newest: int
    published: frozenset[Target]
    held: dict[str, int]
    linked: frozenset[str]
    gone: frozenset[str]
    heard: Mapping[str, float]

    @classmethod
    def now(cls, world: World, region: ModelRegion) -> Moment:
        """This moment."""
        links = {rack.system_id: rack.links.get(region.owner) for rack in world.racks.values()}
        linked = frozenset(
            system_id
            for system_id, link in links.items()
            if link is not None and not link.wire.stalled and region.registry.link_of(system_id) is link.region
        )
        held = {each.system_id: len(each.history) for each in world.racks.values()}
        gone = frozenset(system_id for system_id, rack in world.strangers.items() if region.owner in rack.gone)
        at, step = world.turns.seconds(), world.turns.steps
        heard = dict(world.heard.get(region, {}))
        latest = region.generations.latest
        newest = 0 if latest is None else latest.number
        return cls(at, step, world.disturbances, newest, published_by(region), held, linked, gone, heard)


def published_by(region: ModelRegion) -> frozenset[Target]:
    """What the region process knows to be published."""
    latest = region.generations.latest
    return frozenset() if latest is None else frozenset(targets_of(latest.manifest))


@define(eq=False)
class Question:
    """A request to the API. ``target`` None is the list of all; ``racks`` are those that have to serve the machine, as
    the client calls them (none: all).

    ``since`` is when it was made; or when the round began that was in flight then, since it is answered from that one.
    """

    world: World
    region: ModelRegion
    target: Target | None
    policy: str
    racks: tuple[str, ...]
    since: Moment
    asked: Moment
    connection: SiteConnection = field(init=False)

    @classmethod
    def begun(
        cls,
        world: World,
        region: ModelRegion,
        target: Target | None,
        policy: str,
        racks: tuple[str, ...],
        *,
        apart: bool,
    ) -> Question:
        """A question that is asked now.

        :param apart: whether each rack is a parameter of its own, and not one of a list.
        """
        since = region.round_began if region.asker._waiting is not None else None
        now = Moment.now(world, region)
        question = cls(world, region, target, policy, racks, since or now, now)
        fields: list[tuple[str, str]] = [("policy", policy)]
        if target is not None:
            fields.append(("arch", target.arch))
        if racks:
            fields.extend([("rack", rack) for rack in racks] if apart else [("racks", ",".join(racks))])
        path = "releases/" if target is None else f"releases/{target.name}/"
        question.connection = SiteConnection(region.site)
        question.connection.send("GET", f"{path}?{urlencode(fields)}")
        return question

    @property
    def chosen(self) -> set[str] | None:
        """The racks that have to serve the machine, of those that there are still; None if that cannot be told,
        because one was called otherwise meanwhile."""
        if not self.racks:
            return set(self.world.racks)
        found: set[str] = set()
        for called in self.racks:
            meant = self.world.called(called, self.since.step)
            if len(meant) != 1:
                return None
            found |= meant
        return found & set(self.world.racks)

    def _during(self, system_id: str) -> list[Inventory]:
        """All that a rack held from when this was asked until now."""
        rack = self.world.racks.get(system_id)
        return [] if rack is None else rack.history[max(self.since.held.get(system_id, 0) - 1, 0) :]

    def _always(self, target: Target) -> set[str]:
        """The racks that held ``target`` the whole time."""
        return {
            system_id
            for system_id, count in self.since.held.items()
            if count and system_id in self.world.racks
            and all(target in targets_of(each.manifest) for each in self._during(system_id))
        }  # fmt: skip

    def _ever(self, target: Target) -> set[str]:
        """The racks that held ``target`` at some time."""
        return {
            system_id
            for system_id in self.world.racks
            if any(target in targets_of(each.manifest) for each in self._during(system_id))
        }

    @property
    def is_undisturbed(self) -> bool:
        """Whether no time has passed since, no link was lost or held up, and no rack has gone."""
        return (self.since.at, self.since.disturbances) == (self.world.turns.seconds(), self.world.disturbances)

    def check(self) -> None:
        """:raises AssertionError: if the answer that has come is not right."""
        response = self.connection.response()
        CHECKED["answers"] += 1
        CHECKED[f"answers {response.status}"] += 1
        assert response.status in (200, 400, 409, 503), f"{response.status}: {response.text}"
        assert "one of: ''" not in response.text, response.text
        if response.status in (409, 503):
            assert int(response.headers["Retry-After"]) > 0
        if response.status == 503 and "database" in response.text:
            # While time passes and the database's results do not come, its connections are all in use.
            assert not self.is_undisturbed, response.text
        elif response.status == 400 and {"rack", "racks"} & response.json.keys():
            # Each was a rack when this was asked, under that name, and is still.
            unsure = [called for called in self.racks if not self.world.is_called(called, self.asked.step)]
            assert unsure, f"{self.racks}: {response.text}"
        elif self.target is None:
            self._check_list(response.status, response.json)
        else:
            self._check_one(self.target, response.status, response.text)

    def _check_one(self, target: Target, status: int, text: str) -> None:
        chosen = self.chosen
        if chosen is None:
            return
        always, ever = self._always(target) & chosen, self._ever(target) & chosen
        published = target in self.since.published and target in published_by(self.region)
        everyone = chosen & set(self.since.held)
        if status == 200:
            document = json.loads(text)
            assert document["state"] == "deployable", text
            [entry] = document["architectures"]
            holders = {row["system_id"] for row in entry["racks"] if row["holds"]}
            # A rack that has gone since is not known here any more.
            there = holders & set(self.world.racks)
            assert holders, text
            assert there <= ever, f"{target} is said to be held by {holders}, not {ever}"
            assert self.policy == "any" or everyone <= ever, f"{target}: all of {everyone} are to hold it, not {ever}"
            self._check_racks(document, entry["racks"])
        if status == 409:
            newer = [number for number in self.world.generations if number >= self.since.newest]
            listed = {each for number in newer for each in targets_of(self.world.generations[number])}
            assert target in listed, f"{target} is said to arrive, but generations {newer} do not list it: {text}"
            self._check_racks(json.loads(text), json.loads(text)["architectures"][0]["racks"])
        if status == 503 and '"architectures"' in text:
            self._check_racks(json.loads(text), json.loads(text)["architectures"][0]["racks"])
        if status == 400:
            assert "should be one of: '" in text, text
            assert not always, f"{target}: 400, but held by {always}: {text}"
            assert not published, f"{target}: 400, but it is published: {text}"
        linked = self.since.linked
        enough = always & linked if self.policy == "any" else everyone == always <= linked
        if self.is_undisturbed and enough and always and chosen == everyone:
            assert status == 200, f"{target}: {status}, but {always} hold it and answer: {text}"

    def _check_list(self, status: int, document: Any) -> None:
        self._check_racks(document, document["racks"])
        listed = {
            Target(entry["os"], entry["release"], arch["arch"]): arch
            for entry in document["releases"]
            for arch in entry["architectures"]
        }
        for target, entry in listed.items():
            there = {rack for rack in entry["racks"] if rack in self.world.racks}
            assert there <= self._ever(target), f"{target} is said to be held by {there}"
        if status == 503:
            assert document["reason"], document
            chosen = self.since.linked & (self.chosen or set())
            held = {target for target in listed if self._always(target) & chosen}
            assert not (held and self.is_undisturbed and self.policy == "any"), document
        missing = (self.since.published & published_by(self.region)) - set(listed)
        assert not missing, f"{missing} are published, and not listed"

    def _check_racks(self, document: Any, rows: list[Any]) -> None:
        """What is said of each rack is what it held at some time since this was asked, or once, of one that is silent;
        and what is said to be so old is not older than the last word of that rack."""
        numbers = self.world.generations
        current = document["generation"]
        if current is not None:
            assert numbers[current["number"]].digest == current["digest"], document
        gone = {row["system_id"] for row in rows} & self.since.gone
        assert not gone, f"{gone} are no racks any more, and are in the answer: {document}"
        assert document["policy"] == self.policy, document
        for row in rows:
            rack = self.world.racks.get(row["system_id"])
            if rack is None:
                continue
            assert row["name"] in rack.names, f"{row} but it was called {rack.names}"
            self._check_ages(row)
            if row["generation"] is not None and current is not None:
                behind = max(current["number"] - row["generation"], 0)
                assert row["behind"] >= behind, f"{row} but the current generation is {current}"
            if row["outcome"] == "answered":
                held = {each.generation if each.generation >= 0 else None for each in self._during(row["system_id"])}
                assert row["generation"] in held | ({None} if not held else set()), f"{row} but held {held}"
                assert row["since"] is None, row
                self.world.heard.setdefault(self.region, {})[rack.system_id] = self.since.at
            else:
                assert row["reason"], row
                ever = {each.generation for each in rack.history} | {None}
                assert row["generation"] in ever, f"{row} but it held {ever}"

    def _check_ages(self, row: Any) -> None:
        now = self.world.turns.seconds()
        if row["since"] is not None:
            heard = self.since.heard.get(row["system_id"], 0.0)
            since = datetime.fromisoformat(row["since"]).timestamp()
            assert int(heard) <= since <= now, f"{row}, but it answered at {heard}, and now it is {now}"
        if row.get("reported") is not None:
            reported = datetime.fromisoformat(row["reported"]).timestamp()
            assert reported <= now, f"{row}, but now it is {now}"


@define(eq=False)
class Reading:
    """A client that reads the stream from its index to the last file."""

    world: World
    oldest: int
    at: float
    owner: str
    done: Deferred[None] = field(init=False)
    result: Any = None
    digest: str = ""

    @classmethod
    def begun(cls, world: World) -> Reading:
        """A client that begins now."""
        reading = cls(world, max(world.generations, default=0), world.turns.seconds(), f"reader-{world.turns.steps}")
        agent = MemoryAgent(world.turns, reading.owner, world.site)
        reading.done = Deferred.fromCoroutine(reading._read(HttpClient(world.turns, agent=agent)))
        reading.done.addBoth(reading._ended)
        return reading

    def _ended(self, result: Any) -> None:
        self.result = result if isinstance(result, Failure) else True

    def cut(self) -> None:
        """Lose the connections."""
        self.done.cancel()
        for lane in list(self.world.turns.lanes):
            if isinstance(lane, Wire) and lane.owner == self.owner:
                lane.cut()

    async def _read(self, client: HttpClient) -> None:
        index = json.loads(await client.read(f"{STREAM_URL}/streams/v1/index.json", limit=LIMIT))
        digests = {entry["path"].split("/")[1] for entry in index["index"].values()}
        assert len(digests) <= 1, f"the index mixes generations: {digests}"
        if not digests:
            return
        [self.digest] = digests
        files: dict[str, int] = {}
        products: Counter[str] = Counter()
        for content_id, entry in sorted(index["index"].items()):
            document = json.loads(await client.read(f"{STREAM_URL}/{entry['path']}", limit=LIMIT))
            assert (document["content_id"], sorted(document["products"])) == (content_id, entry["products"])
            assert document["updated"] == entry["updated"]
            for name, product in document["products"].items():
                products[name] += 1
                for version in product["versions"].values():
                    files |= {item["path"]: item["size"] for item in version["items"].values()}
        manifest = next(each for each in self.world.generations.values() if each.digest == self.digest)
        assert {f"blobs/{sha256}": size for sha256, size in manifest.blobs.items()} == files, "the stream is mixed"
        assert sum(products.values()) == len(manifest.images)
        for path, size in files.items():
            await self._read_file(client, path, size)

    async def _read_file(self, client: HttpClient, path: str, size: int) -> None:
        sha256 = path.removeprefix("blobs/")
        where, spoiled = self.world.blobs / "blobs" / sha256, self.world.spoiled
        begun, before = self.world.turns.steps, identity_of(where)
        was_silent = before in spoiled.files and spoiled.files[before].is_silent
        try:
            data = await client.read(f"{STREAM_URL}/{path}", limit=LIMIT)
        except FetchError as error:
            newest = self.world.generations[max(self.world.generations)]
            if sha256 not in spoiled.contents or (error.status == 404 and sha256 in newest.blobs):
                raise
            # What only an older generation has does not come again, so its client is told to read the index.
            CHECKED["damaged files refused"] += 1
            return
        if hashlib.sha256(data).hexdigest() != sha256 or len(data) != size:
            # It looked right and nobody knew otherwise; or it was spoiled while it was sent.
            meanwhile = any(flip.step >= begun for flip in spoiled.files.values())
            assert sha256 in spoiled.contents, f"{path} is torn"
            assert was_silent or meanwhile, f"{path} was known to be damaged"
            CHECKED["damaged files read"] += 1
        CHECKED["files read"] += 1

    def check(self) -> None:
        """:raises AssertionError: if it ended otherwise than it may."""
        CHECKED["streams read"] += 1
        if not isinstance(self.result, Failure) or self.result.check(CancelledError):
            return
        error = self.result.value
        if not isinstance(error, FetchError):
            self.result.raiseException()
        if error.status == 503 and not self.digest:
            assert not self.oldest, f"it was published when the client began: {error}"
            return
        if error.status == 404:
            # Two others were published since it began; to read the index again is what it is told.
            newest = max(self.world.generations)
            number = max(n for n, each in self.world.generations.items() if each.digest == self.digest)
            assert number < newest - 1, f"generation {number} is kept, of {newest}: {error}"
            return
        if not error.status and self.world.turns.seconds() > self.at:
            return  # it was not let go on, and gave up by itself
        raise AssertionError(f"a client of the stream got: {error}")
