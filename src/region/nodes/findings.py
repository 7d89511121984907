"""What should people know of a node although what was done for it succeeded? Each finding becomes an event."""

from __future__ import annotations

from attrs import frozen

from rpc.events import Kind


@frozen
class Finding:
    """One thing to know: ``description`` is a sentence that says what it is about, and what to do where that helps."""

    kind: Kind
    description: str
