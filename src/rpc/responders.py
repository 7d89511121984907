"""What one end of a link answers, and to whom.

A table of command to async function, with the gate before it: what the peer's role may not call is refused whatever
the table has. Whatever a function raises or returns, what comes out is an answer or one typed refusal.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from twisted.python.failure import Failure

from rpc.arguments import Malformed
from rpc.boxes import pairs
from rpc.commands import BY_NAME, Command, DeclaredError, Register, Role
from rpc.failures import ArgumentsRefused, CallFailed, NotAllowed, Unavailable, Unhandled, UnknownCommand

if TYPE_CHECKING:
    from rpc.protocol import Link

Responder = Callable[..., Awaitable[Mapping[str, Any]]]
"""An async function of the link and the command's arguments by name, which gives the answer's values by name."""


class Refused(Exception):
    """A command is not answered, but with ``error``, which travels under ``code``. ``internal`` has the traceback."""

    def __init__(
        self, command: type[Command] | None, error: CallFailed | DeclaredError, code: bytes, internal: Failure | None
    ) -> None:
        super().__init__(str(error))
        self.command = command
        self.error = error
        self.code = code
        self.internal = internal


class Responders:
    """What an end that is ``role`` answers: for each command the function that answers it. Ping need not be there.

    A function may raise what its command declares, or
    :class:`NotAllowed` or :class:`Unavailable`. Anything else that it raises is an internal
    error: the peer gets a reference, the log the traceback.

    :raises ValueError: if a command is not for this role to answer.
    """

    def __init__(self, role: Role, table: Mapping[type[Command], Responder]) -> None:
        for command in table:
            if role not in command.answered_by:
                raise ValueError(f"{command.__name__} is not for the {role} to answer")
        self.role = role
        self._table = dict(table)

    def _gate(self, link: Link, name: bytes) -> tuple[type[Command], Responder]:
        command = BY_NAME.get(name)
        allowed = command is not None and link.peer.role in command.called_by and self.role in command.answered_by
        if not allowed and (command is not None or link.peer.role == "anonymous"):
            # To a stranger, commands that exist and commands that do not look the same.
            what = command.__name__ if command is not None else repr(name[:64])
            raise _refused(command, NotAllowed(f"{link.peer} may not call {what} here"))
        if command is None or command not in self._table or command.since > link.version:
            raise _refused(command, UnknownCommand(f"there is no {name[:64]!r} here: is the other end newer?"))
        if link.peer.role == "rack" and not link.registered and not command.unregistered:
            raise _refused(command, NotAllowed(f"{link.peer} may not call {command.__name__} before Register"))
        return command, self._table[command]

    async def answer(self, link: Link, name: bytes, box: Mapping[bytes, bytes]) -> bytes:
        """The pairs of the answer's box.

        :raises Refused: in every other case.
        """
        command, function = self._gate(link, name)
        try:
            arguments = command.argument_schema.load(box)
        except Malformed as error:
            raise _refused(command, ArgumentsRefused(f"{command.__name__}: {error}")) from error
        try:
            answer = await function(link, **arguments)
            encoded = pairs(command.answer_schema.dump(answer).items())
            if command is Register:
                link.agreed(answer["version"])
            return encoded
        except (NotAllowed, Unavailable) as error:
            raise _refused(command, error) from error
        except Exception as error:  # becomes a typed refusal; the link reports it
            for code, kind in command.declared.items():
                if isinstance(error, kind):
                    raise Refused(command, error, code, None) from error
            reference = uuid.uuid4().hex[:12]
            what = f" ({type(error).__name__})" if link.peer.role != "anonymous" else ""
            unhandled = Unhandled(f"it failed unexpectedly{what}; its log has more under {reference}", reference)
            raise Refused(command, unhandled, Unhandled.code, Failure()) from error


def _refused(command: type[Command] | None, error: CallFailed) -> Refused:
    return Refused(command, error, error.code, None)
