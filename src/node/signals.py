"""How is what the runner has to tell written as a signal of MAAS's metadata service: a form with ``op=signal``?"""

from typing import Any, Mapping, Optional, Tuple

from node.client import File, encode_form

MESSAGE_CHARACTERS = 2000
"""How much of a message is sent; the region keeps little more."""


def signal(
    status: str, message: str, fields: Optional[Mapping[str, Any]] = None, files: Tuple[File, ...] = ()
) -> Tuple[bytes, str]:
    """The body and the Content-Type. Fields that are None are left out."""
    listed = [("op", "signal"), ("status", status), ("error", message[:MESSAGE_CHARACTERS])]
    listed += [(name, str(value)) for name, value in (fields or {}).items() if value is not None]
    return encode_form(listed, files)
