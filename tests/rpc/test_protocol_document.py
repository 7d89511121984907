"""What docs/protocol.rst says of the wire is what the code does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from twisted.protocols import amp
from twisted.trial.unittest import SynchronousTestCase

from rpc import limits, protocol
from rpc.arguments import KIB, MAX_CHUNK, MIB, Blob
from rpc.asks import REFERENCE, encode
from rpc.boxes import MAX_ANONYMOUS_BOX, MAX_BOX, MAX_PAIRS, Parser
from rpc.certificates import RACK_URI, REGION_URI
from rpc.commands import COMMANDS, PROTOCOL_VERSION, Command, ListImages, Ping
from rpc.failures import TRAVELLING
from rpc.identity import BINDING_BYTES, EXPORTER_LABEL
from rpc.versions import OLDEST_VERSION

DOCUMENT = (Path(__file__).parents[2] / "docs" / "protocol.rst").read_text("utf-8")


def heading(command: type[Command]) -> str:
    return command.commandName.decode("ascii")


def described(command: type[Command]) -> str:
    """The field list that the document must have for ``command``."""
    errors = ", ".join(f"``{code.decode('ascii')}``" for code in command.declared)
    return "\n".join(
        [
            f":called by: {', '.join(sorted(command.called_by))}",
            f":answered by: {', '.join(sorted(command.answered_by))}",
            f":since: version {command.since}",
            f":deadline: {command.deadline:g} s",
            f":arguments: {_values(command.arguments)}",
            f":answer: {_values(command.response)}",
            f":errors: {errors or 'none of its own'}",
        ]
    )


def _values(arguments: Any) -> str:
    return ", ".join(_value(name.decode("ascii"), argument) for name, argument in arguments) or "nothing"


def _value(name: str, argument: Any) -> str:
    text = f"``{name}`` ({argument.kind}"
    if isinstance(argument, Blob):
        text += f" of up to {_bytes(argument.limit)}"
    return text + (", may be left out)" if argument.optional else ")")


def _bytes(number: int) -> str:
    return f"{number // MIB} MiB" if number % MIB == 0 else f"{number // KIB} KiB"


def examples() -> dict[str, bytes]:
    """The bytes of each hexadecimal dump in the document, by the end of the line before it."""
    found: dict[str, bytes] = {}
    for title, dump in re.findall(r"([A-Z][a-z ]+)::\n\n((?:    [0-9a-f]{2} .*\n)+)", DOCUMENT):
        found[title] = b"".join(bytes.fromhex(line.strip().split("   ")[0]) for line in dump.splitlines())
    return found


class DocumentTests(SynchronousTestCase):
    maxDiff = None

    def test_every_command_is_described_as_it_is(self) -> None:
        for command in COMMANDS:
            title = f"\n{heading(command)}\n{'.' * len(heading(command))}\n"
            self.assertIn(title, DOCUMENT)
            section = DOCUMENT.split(title)[1].split("\n.....")[0]
            self.assertIn(described(command), section, heading(command))

    def test_no_other_command_is_described(self) -> None:
        titles = re.findall(r"^(\w+)\n\.+$", DOCUMENT, re.MULTILINE)
        self.assertEqual(sorted(titles), sorted(heading(command) for command in COMMANDS))

    def test_every_error_code_is_explained(self) -> None:
        codes = {code for command in COMMANDS for code in command.declared} | set(TRAVELLING)
        listed = set(re.findall(r"^``([A-Z_]+)``  ", DOCUMENT, re.MULTILINE))
        self.assertEqual(listed, {code.decode("ascii") for code in codes})

    def test_the_numbers_are_the_codes(self) -> None:
        for said in (
            f"version {PROTOCOL_VERSION}",
            f"at most {MAX_CHUNK:,} bytes",
            f"{_bytes(MAX_BOX)}",
            f"{_bytes(MAX_ANONYMOUS_BOX)}",
            f"up to {MAX_PAIRS} pairs",
            f"On one link up to {limits.MAX_ANSWERING} asks are answered at a time, and "
            f"{limits.MAX_ANONYMOUS_ANSWERING} of a peer",
            f"after {limits.MAX_REFUSED} such refusals",
            f"up to {limits.MAX_CALLS} calls of its own",
            f"more than {_bytes(limits.MAX_UNREAD)} wait",
            f"({_bytes(limits.MAX_ANONYMOUS_UNREAD)} if it has no certificate)",
            f"Up to {limits.MAX_STRANGERS} connections",
            f"up to {limits.MAX_LINKS} links",
            f"a link speaks version {OLDEST_VERSION}",
            f"every {protocol.PING_INTERVAL:g} seconds",
            f"within {protocol.PING_PATIENCE:g} seconds",
            f"{protocol.ANONYMOUS_SECONDS:g} seconds",
            f"{protocol.HANDSHAKE_SECONDS:g} seconds",
            f"at most {protocol.MAX_TAG} bytes",
            f"``{REGION_URI}``",
            f"``{RACK_URI}<system id>``",
            f"``{EXPORTER_LABEL.decode('ascii')}``",
            f"{BINDING_BYTES} bytes",
            f"``{REFERENCE.decode('ascii')}``",
        ):
            self.assertIn(said, DOCUMENT)

    def test_the_examples_are_the_bytes_on_the_wire(self) -> None:
        found = examples()
        self.assertEqual(set(found), {"The region asks", "The rack answers", "The region pings", "The rack fails"})
        boxes: dict[str, dict[bytes, bytes]] = {}
        for title, data in found.items():
            received: list[dict[bytes, bytes]] = []

            def receive(box, received=received):
                received.append(box)
                return True

            Parser().feed(data, receive)
            [boxes[title]] = received
        self.assertEqual(found["The region pings"], b"\0\x04_ask\0\x011" + encode(Ping, {}))
        ask = encode(ListImages, {"known_digest": ""})
        self.assertEqual(found["The region asks"], b"\0\x04_ask\0\x012" + ask)
        self.assertEqual(
            ListImages.answer_schema.load(boxes["The rack answers"]),
            {"state": "empty", "generation": -1, "digest": "", "inventory": None},
        )
        self.assertEqual(boxes["The rack answers"][amp.ANSWER], b"2")
        self.assertEqual(boxes["The rack fails"][amp.ERROR_CODE], b"UNKNOWN")
        self.assertIn(REFERENCE, boxes["The rack fails"])
