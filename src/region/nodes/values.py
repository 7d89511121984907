"""What do the parts of the region tell each other about a node?"""

from __future__ import annotations

from attrs import frozen

from region.nodes.statuses import NodeStatus


@frozen
class NodeName:
    """Which node: its number in the database, its ``system_id`` (six characters), and its host name."""

    id: int
    system_id: str
    hostname: str


@frozen
class Standing:
    """Where a node stands, as it is told with every answer: its status, and whether its runner is to stop.

    ``stop`` means that nothing that the runner could still do is wanted: its run was aborted, timed out, or replaced.
    """

    status: NodeStatus
    stop: bool
