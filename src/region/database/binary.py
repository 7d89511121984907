"""How do many bytes get into a statement without costing more than storing them?

psycopg2 puts parameters into the statement's text. Its own way for bytes (hexadecimal, escaped by libpq) takes 0.5 ms
for 64 KiB, more than the server needs to insert them; base64 takes a tenth of that, and is a third shorter to read.
"""

from __future__ import annotations

from base64 import b64encode
from typing import Any

from attrs import frozen
from psycopg2.extensions import ISQLQuote


@frozen
class Bytes:
    """``content`` as a parameter of type ``bytea``."""

    content: bytes

    def __conform__(self, protocol: Any) -> Bytes | None:
        return self if protocol is ISQLQuote else None

    def getquoted(self) -> bytes:
        """It, in SQL."""
        return b"decode('" + b64encode(self.content) + b"','base64')"
