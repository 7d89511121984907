"""What should people know of a node although what was done for it succeeded? Each finding becomes an event. And what if
the fault is in what its scripts wrote, and not in the region?"""

from __future__ import annotations

from attrs import frozen

from rpc.events import Kind


@frozen
class Finding:
    """One thing to know: ``description`` is a sentence that says what it is about, and what to do where that helps."""

    kind: Kind
    description: str


class OutputUnusable(Exception):
    """What a script wrote cannot be used; the text is a sentence that says what is wrong with it.

    That is a fault of the script, or of what it found, and people are told so: every other exception is one of the
    region's own. A step that fails so is stored with this class's name, whatever the subclass is.
    """
