"""Who may call what: derived from the table, and tried for every command, caller and answerer."""

from __future__ import annotations

from typing import Any

from twisted.internet.task import Clock
from twisted.protocols import amp
from twisted.test.iosim import FakeTransport
from twisted.trial.unittest import SynchronousTestCase

from rpc.boxes import END, pairs
from rpc.commands import (
    BY_NAME,
    COMMANDS,
    PROTOCOL_VERSION,
    Command,
    DeclaredError,
    Endpoints,
    Enroll,
    ListImages,
    Ping,
    Register,
    Role,
)
from rpc.failures import TRAVELLING
from rpc.protocol import Link, Responders
from rpc.testing import ANONYMOUS, RACK, REGION, RecordingReporter
from rpc.versions import VERSIONS

PEERS = {"rack": RACK, "region": REGION, "anonymous": ANONYMOUS}
ROLES: tuple[Role, ...] = ("region", "rack")


class GateTests(SynchronousTestCase):
    def ask(self, role: Role, peer, name: bytes, registered: bool = True) -> tuple[bytes, list[str]]:
        """The error code with which an end that is ``role`` answers ``peer``, and the names of what ran."""
        ran: list[str] = []

        def responder(command):
            async def answer(link, **arguments):
                ran.append(command.__name__)
                raise RuntimeError("it ran")

            return answer

        table = {command: responder(command) for command in COMMANDS if role in command.answered_by}
        self.reports = RecordingReporter()
        link = Link(Responders(role, table), clock=Clock(), peer=peer, interval=0, reporter=self.reports)
        transport = FakeTransport(link, True)
        link.makeConnection(transport)
        if registered:
            link.agreed(PROTOCOL_VERSION)
        link.dataReceived(pairs([(b"_ask", b"1"), (b"_command", name), *self.arguments(name)]) + END)
        [box] = amp.parseString(transport.getOutBuffer())
        return box.get(b"_error_code", b""), ran

    def arguments(self, name) -> list[tuple[bytes, bytes]]:
        command = BY_NAME.get(name)
        samples: dict[str, Any] = {"text": "x", "integer": 1, "boolean": True, "bytes": b"x", "blob": b"", "JSON": []}
        if command is None:
            return []
        values = {wire.decode(): samples[argument.kind] for wire, argument in command.arguments}  # type: ignore[attr-defined]  # each is one of rpc.arguments
        return list(command.argument_schema.dump(values).items())

    def test_a_command_runs_only_for_the_role_that_may_call_it(self) -> None:
        for command in COMMANDS:
            for role in ROLES:
                for peer in PEERS.values():
                    code, ran = self.ask(role, peer, command.commandName)
                    allowed = role in command.answered_by and peer.role in command.called_by
                    if command is Ping and allowed:
                        self.assertEqual((code, ran), (b"", []))  # answered by the link itself
                    elif allowed:
                        self.assertEqual((code, ran), (b"UNKNOWN", [command.__name__]))
                    else:
                        self.assertEqual((code, ran), (b"NOT_ALLOWED", []), (command, role, peer))
                        self.assertEqual(self.reports.kinds, ["NotAllowed"])

    def test_a_rack_that_has_not_registered_may_ask_where_to_and_register_and_nothing_else(self) -> None:
        ran = [command for command in COMMANDS if self.ask("region", RACK, command.commandName, registered=False)[1]]
        self.assertEqual(ran, [Endpoints, Register])
        for command in COMMANDS:
            if command.answered_by == {"region"} and command.called_by == {"rack"} and command not in ran:
                self.assertEqual(
                    self.ask("region", RACK, command.commandName, registered=False), (b"NOT_ALLOWED", []), command
                )
                self.assertIn("before Register", self.reports.calls[0].text)

    def test_a_stranger_may_enrol_and_nothing_else(self) -> None:
        allowed = [command for command in COMMANDS if "anonymous" in command.called_by]
        self.assertEqual(allowed, [Enroll])

    def test_to_a_stranger_what_exists_looks_like_what_does_not(self) -> None:
        for name in (b"ListImages", b"Ping", b"Nonsense", b"StartTLS", b"\xff" * 300):
            self.assertEqual(self.ask("region", ANONYMOUS, name), (b"NOT_ALLOWED", []))

    def test_an_unknown_command_is_no_label_of_a_metric(self) -> None:
        self.assertEqual(self.ask("region", RACK, b"Nonsense"), (b"UNHANDLED", []))
        self.assertEqual(self.reports.calls[0].command, "(unknown)")

    def test_a_table_with_anothers_command_is_refused_when_it_is_made(self) -> None:
        async def answer(link, **arguments):
            return {}

        self.assertRaises(ValueError, Responders, "region", {ListImages: answer})
        self.assertRaises(ValueError, Responders, "anonymous", {Enroll: answer})


class TableTests(SynchronousTestCase):
    def test_every_command_has_callers_an_answerer_and_a_deadline(self) -> None:
        for command in COMMANDS:
            self.assertTrue(command.called_by, command)
            self.assertTrue(command.answered_by, command)
            self.assertGreater(command.deadline, 0)
            self.assertTrue(command.__doc__, command)

    def test_a_command_that_does_not_say_who_calls_or_answers_it_cannot_be_declared(self) -> None:
        nobody: frozenset[Role] = frozenset()
        somebody: frozenset[Role] = frozenset({"rack"})
        for callers, answerers in ((nobody, somebody), (somebody, nobody), (nobody, nobody)):
            fields = {"called_by": callers, "answered_by": answerers, "__doc__": "One that forgot."}
            self.assertRaises(TypeError, type(Command), "Forgetful", (Command,), fields)

    def test_every_command_came_with_a_version_that_there_is(self) -> None:
        self.assertTrue(all(command.since in VERSIONS for command in COMMANDS))

    def test_no_key_of_a_command_can_be_taken_for_one_of_amps_or_for_a_chunk(self) -> None:
        for command in COMMANDS:
            names = [wire for wire, _ in (*command.arguments, *command.response)]
            for name in names:
                self.assertRegex(name.decode("ascii"), r"^[a-z][a-z_]*$")
            self.assertNotIn(b"deadline", names)

    def test_error_codes_are_told_apart(self) -> None:
        codes = [code for command in COMMANDS for code in command.declared]
        self.assertEqual(len(set(codes)), len(codes))
        self.assertEqual(set(codes) & set(TRAVELLING), set())
        self.assertTrue(all(issubclass(kind, DeclaredError) for command in COMMANDS for kind in command.errors))
