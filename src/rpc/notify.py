"""How a daemon tells whoever started it that it serves, what it is doing, and that it stops.

This is systemd's protocol (sd_notify(3)): one datagram of ``NAME=value`` lines to the Unix socket that the environment
variable ``NOTIFY_SOCKET`` names. With no such variable nothing is sent, so a daemon calls it always.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping

from attrs import frozen
from twisted.logger import Logger

log = Logger()


@frozen
class Notifier:
    """Sends the daemon's state to ``address``, a Unix socket's path or ``@abstract`` name; "" sends nothing."""

    address: str = ""

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str] = os.environ) -> Notifier:
        """The notifier of this process.

        The variable is taken out of ``environment``, so that a child process (PostgreSQL knows the protocol too)
        cannot say "ready" in this daemon's name.
        """
        return cls(environment.pop("NOTIFY_SOCKET", ""))

    def ready(self, status: str = "") -> bool:
        """Say that the daemon now serves; ``status`` is one line for people."""
        return self._send(READY="1", STATUS=status)

    def status(self, status: str) -> bool:
        """Say what the daemon is doing, in one line for people."""
        return self._send(STATUS=status)

    def stopping(self, status: str = "") -> bool:
        """Say that the daemon has begun to stop."""
        return self._send(STOPPING="1", STATUS=status)

    def _send(self, **values: str) -> bool:
        """Whether the message was sent. A failure is logged: the daemon serves all the same."""
        if not self.address:
            return False
        lines = [f"{name}={' '.join(value.split())}" for name, value in values.items() if value]
        # sd_notify(3): an address that begins with "@" is in the abstract namespace, whose first byte is NUL.
        address = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.setblocking(False)
                sock.sendto("\n".join(lines).encode("utf-8"), address)
        except (OSError, ValueError) as error:
            log.warn(
                "cannot tell the service manager {lines!r} through NOTIFY_SOCKET {address!r}: {error}",
                lines=lines,
                address=self.address,
                error=error,
            )
            return False
        return True
