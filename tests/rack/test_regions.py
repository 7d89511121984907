"""With which region processes a rack is linked while they come, go, and are reached in several ways."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.error import ConnectionRefusedError
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.internet.task import Clock
from twisted.logger import LogLevel, formatEvent, globalLogPublisher
from twisted.test.iosim import FakeTransport, IOPump, connect
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import implementer

from rack.regions import ASK_SECONDS, MOST, Regions
from rack.remembered import RememberedRegions
from rpc.commands import Endpoints, Register
from rpc.endpoints import Reconnecting
from rpc.protocol import Link, Responders
from rpc.testing import RACK, REGION, RecordingReporter

PATIENCE = ASK_SECONDS * 1.2
"""Within this a rack has asked once more."""


class Process:
    """A region process, which tells what ``net`` says."""

    def __init__(self, net: Net, name: str) -> None:
        self.net = net
        self.name = name
        self.links: list[Link] = []
        self.registered: list[Mapping[str, Any]] = []
        self.slow: Deferred[None] | None = None

    def make(self) -> Link:
        responders = Responders("region", {Endpoints: self.endpoints, Register: self.register})
        link = Link(responders, clock=self.net.clock, peer=RACK, interval=0, reporter=RecordingReporter())
        self.links.append(link)
        return link

    async def endpoints(self, link: Link) -> Mapping[str, Any]:
        if self.slow is not None:
            await self.slow
        return {"process": self.name, "endpoints": self.net.told}

    async def register(self, link: Link, **arguments: Any) -> Mapping[str, Any]:
        self.registered.append(arguments)
        return {"version": 1, "region": "region", "stream_urls": []}


@implementer(IStreamClientEndpoint)
class Endpoint:
    """Connects in memory to the process that is at an address now."""

    def __init__(self, net: Net, address: str) -> None:
        self.net = net
        self.address = address

    def connect(self, protocolFactory: Any) -> Deferred[Any]:
        self.net.attempts.append(self.address)
        process = self.net.at.get(self.address)
        if process is None:
            return fail(ConnectionRefusedError())
        rack = protocolFactory.buildProtocol(None)
        region = process.make()
        self.net.pumps.append(
            connect(region, FakeTransport(region, isServer=True), rack, FakeTransport(rack, isServer=False))
        )
        return succeed(rack)


class Net:
    """Which process is at which address, and what they tell of each other."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.at: dict[str, Process] = {}
        self.told: Any = {}
        self.attempts: list[str] = []
        self.pumps: list[IOPump] = []

    def process(self, name: str, *addresses: str) -> Process:
        """A process at ``addresses``, of which the first is told of."""
        process = Process(self, name)
        for address in addresses:
            self.at[address] = process
        self.told = {**self.told, name: [addresses[0]]}
        return process

    def kill(self, process: Process, *, told: bool = False) -> None:
        self.at = {address: each for address, each in self.at.items() if each is not process}
        if not told:
            self.told = {name: addresses for name, addresses in self.told.items() if name != process.name}
        for link in process.links:
            link.abort("killed")
        self.settle()

    def settle(self) -> None:
        while any(pump.pump() for pump in list(self.pumps)):
            pass

    def advance(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.clock.advance(1)
            self.settle()


class RegionsTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.net = Net()
        self.remembered: list[tuple[str, ...]] = []
        self.regions = Regions(self.net.clock, self.dial, self.register, self.remembered.append)
        self.reporter = RecordingReporter()

    def dial(self, address: str, prepare: Any) -> Reconnecting:
        return Reconnecting(
            Endpoint(self.net, address), address, self.make, prepare, clock=self.net.clock, retry=lambda attempt: 1.0
        )

    def make(self) -> Link:
        return Link(Responders("rack", {}), clock=self.net.clock, peer=REGION, interval=0, reporter=self.reporter)

    async def register(self, link: Link, turn: Mapping[str, Any]) -> None:
        await link.call(Register, versions=[1], name="rack-1", software="1", **turn)

    def start(self, *configured: str, remembered: tuple[str, ...] = ()) -> None:
        self.regions.start(configured, remembered)
        self.net.advance(1)

    def linked(self) -> list[str]:
        """The names of the processes that the rack has a registered link with; a name for each link."""
        return sorted(
            process.name
            for process in {id(each): each for each in self.net.at.values()}.values()
            for link in process.links
            if link.life.value == "ready" and link.registered
        )

    def test_a_rack_links_with_every_process_that_it_is_told_of(self) -> None:
        one = self.net.process("one", "a:1")
        self.net.process("two", "b:1")
        self.net.process("three", "c:1")
        self.start("a:1")
        self.assertEqual(self.linked(), ["one", "three", "two"])
        self.assertEqual(self.remembered, [("a:1", "b:1", "c:1")])
        self.assertEqual(len(one.registered), 1)

    def test_a_process_that_comes_is_linked_with_within_a_minute(self) -> None:
        self.net.process("one", "a:1")
        self.start("a:1")
        self.net.process("two", "b:1")
        self.net.advance(PATIENCE)
        self.assertEqual(self.linked(), ["one", "two"])

    def test_a_process_that_went_is_not_tried_any_more(self) -> None:
        self.net.process("one", "a:1")
        two = self.net.process("two", "b:1")
        self.start("a:1")
        self.net.kill(two)
        self.net.advance(PATIENCE)
        self.net.attempts.clear()
        self.net.advance(2 * PATIENCE)
        self.assertEqual(self.net.attempts, [])
        self.assertEqual(self.regions.addresses, ["a:1"])
        self.assertEqual(self.remembered[-1], ("a:1",))

    def test_one_that_is_down_and_still_told_of_is_tried_until_it_is_back(self) -> None:
        self.net.process("one", "a:1")
        two = self.net.process("two", "b:1")
        self.start("a:1")
        self.net.kill(two, told=True)
        self.net.advance(3 * PATIENCE)
        self.assertEqual(self.linked(), ["one"])
        self.net.process("two again", "b:1")
        self.net.advance(PATIENCE)
        self.assertEqual(self.linked(), ["one", "two again"])

    def test_the_others_go_on_when_one_is_lost(self) -> None:
        one = self.net.process("one", "a:1")
        self.net.process("two", "b:1")
        self.start("a:1")
        self.net.kill(one)
        self.assertEqual(self.linked(), ["two"])
        self.net.process("one again", "a:1")  # the configured address is tried all the time
        self.net.advance(2)
        self.assertEqual(self.linked(), ["one again", "two"])

    def test_two_addresses_of_one_process_are_one_link(self) -> None:
        # A rack's settings name the region, and the region advertises an address.
        one = self.net.process("one", "advertised:1", "configured:1")
        self.start("configured:1")
        self.net.advance(3 * PATIENCE)
        self.assertEqual((self.linked(), len(one.registered), len(one.links)), (["one"], 1, 1))

    def test_two_addresses_that_are_tried_at_once_are_one_link(self) -> None:
        one = self.net.process("one", "advertised:1", "configured:1")
        one.slow = Deferred()
        self.start("configured:1", remembered=("advertised:1",))
        self.assertEqual(len(one.links), 2)
        slow, one.slow = one.slow, None
        slow.callback(None)
        self.net.advance(3 * PATIENCE)
        self.assertEqual((self.linked(), len(one.registered), len(one.links)), (["one"], 1, 2))

    def test_when_the_address_in_use_fails_the_other_is_used(self) -> None:
        one = self.net.process("one", "advertised:1", "configured:1")
        self.start("configured:1", remembered=("advertised:1",))
        [using] = [link for link in one.links if link.registered]
        [used] = self.net.attempts[one.links.index(using) :][:1]
        del self.net.at[used]
        using.abort("the address is gone")
        self.net.settle()
        self.assertEqual(self.linked(), [])
        self.net.advance(PATIENCE)
        self.assertEqual(self.linked(), ["one"])

    def test_a_process_that_restarts_is_linked_with_once_though_its_id_is_new(self) -> None:
        one = self.net.process("one", "a:1")
        self.net.process("two", "b:1")
        self.start("a:1", "b:1")
        for turn in range(3):
            self.net.kill(one)
            one = self.net.process(f"one {turn}", "a:1")
            self.net.advance(PATIENCE)
            self.assertEqual(self.linked(), [f"one {turn}", "two"])
            self.assertEqual(len(one.registered), 1)

    def test_what_was_remembered_serves_while_the_configured_one_is_down(self) -> None:
        self.net.process("two", "b:1")
        self.start("a:1", remembered=("b:1", "gone:1"))
        self.net.advance(2)
        self.assertEqual(self.linked(), ["two"])
        self.assertEqual(self.regions.addresses, ["a:1", "b:1"])

    def test_a_link_that_is_up_stays_although_nobody_tells_of_its_process(self) -> None:
        # A process that does not reach the database is not told of, and serves its racks all the same.
        self.net.process("one", "a:1")
        two = self.net.process("two", "b:1")
        self.start("a:1")
        self.net.told = {"one": ["a:1"]}
        self.net.advance(2 * PATIENCE)
        self.assertEqual(self.linked(), ["one", "two"])
        self.assertEqual(len(two.links), 1)

    def test_a_star_is_the_address_that_was_connected_to(self) -> None:
        self.net.process("one", "region.example.com:1")
        self.net.process("two", "region.example.com:2")
        self.net.told = {"one": ["*:1"], "two": ["*:2"]}
        self.start("region.example.com:1")
        self.assertEqual(self.linked(), ["one", "two"])

    def test_each_link_says_which_attempt_of_which_start_of_the_rack_it_is(self) -> None:
        one = self.net.process("one", "a:1")
        self.start("a:1")
        one.links[-1].abort("once")
        self.net.settle()
        self.net.advance(2)
        first, second = one.registered
        self.assertEqual(first["instance"], second["instance"])
        self.assertGreater(second["attempt"], first["attempt"])

    def test_an_older_region_that_does_not_know_of_processes_is_one(self) -> None:
        one = self.net.process("one", "a:1")
        one.make = lambda: self.older(one)  # type: ignore[method-assign]  # an older process
        self.start("a:1")
        self.assertEqual(self.linked(), ["one"])
        self.net.advance(3 * PATIENCE)
        self.assertEqual(self.reporter.kinds, ["UnknownCommand"])

    def older(self, process: Process) -> Link:
        link = Link(
            Responders("region", {Register: process.register}),
            clock=self.net.clock, peer=RACK, interval=0, reporter=RecordingReporter(),
        )  # fmt: skip
        process.links.append(link)
        return link

    def test_stopping_ends_every_link_and_every_timer(self) -> None:
        self.net.process("one", "a:1")
        self.net.process("two", "b:1")
        self.start("a:1", "nobody:1")
        stopping = Deferred.fromCoroutine(self.regions.stop())
        self.net.settle()
        self.net.advance(3)
        self.successResultOf(stopping)
        self.assertEqual(self.linked(), [])
        self.assertEqual(self.net.clock.getDelayedCalls(), [])

    @settings(deadline=None, max_examples=200)
    @given(
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers()
            | st.text()
            | st.sampled_from(["a:1", "*:1", "b:65536", "[::1]:9"]),
            lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=4), inner, max_size=5),
            max_leaves=20,
        )
    )
    def test_whatever_is_told_the_link_stays(self, told: Any) -> None:
        self.setUp()
        self.net.process("one", "a:1")
        self.net.told = told
        self.start("a:1")
        self.net.advance(PATIENCE)
        self.assertEqual(self.linked(), ["one"])

    def test_no_more_addresses_are_tried_than_a_region_may_have(self) -> None:
        self.net.process("one", "a:1")
        self.net.told = {str(number): [f"h{number}:1"] for number in range(5 * MOST)}
        self.start("a:1")
        self.assertLessEqual(len(self.regions.addresses), MOST + 1)
        for turn in range(4):  # others are tried in their place, and not as well
            self.net.told = {str(number): [f"h{(number + turn * MOST) % 320}:1"] for number in range(5 * MOST)}
            self.net.advance(PATIENCE)
            self.assertLessEqual(len(self.regions.addresses), MOST + 1)

    def test_addresses_that_are_none_are_told_in_one_line(self) -> None:
        lines: list[Any] = []
        observer: Any = lines.append
        globalLogPublisher.addObserver(observer)
        self.addCleanup(globalLogPublisher.removeObserver, observer)
        self.net.process("one", "a:1")
        self.net.told = {"x": [[]] * 1000, "y": "no address"}
        self.start("a:1")
        errors = [formatEvent(event) for event in lines if event["log_level"] is LogLevel.error]
        self.assertEqual(errors, ["A region told of a process at '[]', which is no address; and of 1000 more"])


class RememberedTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.patch(os, "fsync", lambda descriptor: None)
        directory = Path(self.mktemp())
        directory.mkdir(parents=True)
        self.path = directory / "regions.json"
        self.later: list[tuple[Deferred[None], Any]] = []
        self.file = RememberedRegions(self.path, self.run_later)

    def run_later(self, function: Any, *arguments: Any) -> Deferred[None]:
        self.later.append((Deferred(), lambda: function(*arguments)))
        return self.later[-1][0]

    def do(self) -> None:
        done, work = self.later.pop(0)
        work()
        done.callback(None)

    def test_what_is_remembered_is_read_again(self) -> None:
        self.assertEqual(self.file.read(), ())
        self.file.remember(("a:1", "b:2"))
        self.do()
        self.assertEqual(RememberedRegions(self.path, self.run_later).read(), ("a:1", "b:2"))

    def test_of_several_in_a_row_the_last_is_kept(self) -> None:
        for number in range(1, 5):
            self.file.remember((f"a:{number}",))
        while self.later:
            self.do()
        self.assertEqual(self.file.read(), ("a:4",))

    def test_a_file_that_is_no_good_is_as_none(self) -> None:
        for text in ("", "{", "[]", "{}", '{"addresses": 5}', '{"addresses": ["x"]}', '{"addresses": [5]}', "\xff"):
            self.path.write_bytes(text.encode("latin-1"))
            self.assertEqual(self.file.read(), ())
        self.path.write_text(json.dumps({"addresses": ["a:1"]}))
        self.assertEqual(self.file.read(), ("a:1",))
