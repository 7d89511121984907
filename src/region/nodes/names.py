"""What may a node be called, and how are its MAC addresses and its architecture written?"""

from __future__ import annotations

import re
from typing import Final

_HOSTNAME: Final = re.compile(
    r"(?=.{1,253}\Z)[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*\Z"
)
_MAC: Final = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}\Z")
_ARCHITECTURE: Final = re.compile(r"[a-z0-9_]+/[A-Za-z0-9._-]+\Z")


class BadName(ValueError):
    """This is no host name, MAC address or architecture; the text says what is wrong, with the value."""


def hostname(text: str) -> str:
    """A host name as it is stored: in lower case.

    :raises BadName: if it is none (RFC 1123).
    """
    name = text.strip().lower()
    if not _HOSTNAME.match(name):
        raise BadName(
            f"'{text}' is not a host name: letters, digits and '-' in parts of up to 63 characters, separated by '.'."
        )
    return name


def default_hostname(system_id: str) -> str:
    """The name of a node that nobody has given one."""
    return f"node-{system_id}"


def mac_address(text: str) -> str:
    """A MAC address as it is stored: ``00:16:3e:00:00:0a``. It may come with ``-`` or in capitals.

    :raises BadName: if it is none.
    """
    address = text.strip().lower().replace("-", ":")
    if not _MAC.match(address):
        raise BadName(f"'{text}' is not a MAC address such as 00:16:3e:00:00:0a.")
    return address


def architecture(text: str, subarchitecture: str = "") -> str:
    """An architecture with its subarchitecture, which is ``generic`` where none is given: ``amd64/generic``.

    :raises BadName: if it is none.
    """
    given = text.strip()
    name = given if "/" in given else f"{given}/{subarchitecture.strip() or 'generic'}"
    if not _ARCHITECTURE.match(name) or ("/" in given and subarchitecture):
        raise BadName(f"'{text}' is not an architecture such as amd64 or amd64/generic.")
    return name
