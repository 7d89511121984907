"""Which status follows which? The whole life of a node, as one table that is read from top to bottom.

A node that is being tested, or is broken, goes back to something that depends on what it was before; the machine has a
state for each. Nothing leads from "never commissioned" to Ready but a commissioning that went well. Statuses that only
a deployment leads to have no way in or out here.
"""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import Any, Final, Protocol

from automat import NoTransition, TypeMachineBuilder

from region.nodes.statuses import NodeStatus


class Input(Enum):
    """What happens to a node. The values are names of the methods of :class:`Inputs`."""

    COMMISSION = "commission"
    COMMISSIONED = "commissioned"
    BEGIN_TESTING = "begin_testing"
    FAIL = "fail"
    TEST = "test"
    TESTED = "tested"
    ABORT = "abort"
    MARK_BROKEN = "mark_broken"
    MARK_FIXED = "mark_fixed"

    @property
    def label(self) -> str:
        """Its name in a sentence, as in ``mark broken``."""
        return self.value.replace("_", " ")


REQUESTS: Final = frozenset({Input.COMMISSION, Input.TEST, Input.ABORT, Input.MARK_BROKEN, Input.MARK_FIXED})
"""What people can ask for."""


class Inputs(Protocol):
    """What can happen to a node; each gives the status that it has then."""

    def commission(self) -> NodeStatus:
        """It is to be commissioned."""

    def commissioned(self) -> NodeStatus:
        """Its commissioning ended well, and there is nothing to test."""

    def begin_testing(self) -> NodeStatus:
        """Its commissioning ended well, and tests are to follow."""

    def fail(self) -> NodeStatus:
        """What is being done with it failed."""

    def test(self) -> NodeStatus:
        """It is to be tested."""

    def tested(self) -> NodeStatus:
        """Its tests ended well."""

    def abort(self) -> NodeStatus:
        """Somebody wants no more of what is being done with it."""

    def mark_broken(self) -> NodeStatus:
        """Somebody says that it is broken."""

    def mark_fixed(self) -> NodeStatus:
        """Somebody says that it is mended."""


class NotAllowed(Exception):
    """This cannot happen to a node in its status; the text says what can. ``allowed`` has the inputs that can."""

    def __init__(self, status: NodeStatus, given: Input, allowed: frozenset[Input]) -> None:
        self.status = status
        self.input = given
        self.allowed = allowed
        # Somebody who asks is told what can be asked for, and not what else may happen.
        said = allowed & REQUESTS if given in REQUESTS else allowed
        possible = ", ".join(sorted(each.label for each in said)) or "nothing"
        super().__init__(f"A node that is {status.label!r} cannot take {given.label!r}; it can take: {possible}.")


class _Nothing:
    """What the states share: nothing, the table is all there is."""


_builder = TypeMachineBuilder(Inputs, _Nothing)
_new = _builder.state("new")
_commissioning = _builder.state("commissioning")
_failed_commissioning = _builder.state("failed commissioning")
_ready = _builder.state("ready")
_testing_commissioned = _builder.state("testing, as a part of commissioning")
_testing_ready = _builder.state("testing what was ready")
_testing_again = _builder.state("testing what failed its tests before")
_testing_failed = _builder.state("testing what failed its commissioning")
_failed_testing = _builder.state("failed testing")
_broken = _builder.state("broken, and never commissioned, or not known to be")
_broken_commissioned = _builder.state("broken, and was commissioned")
_elsewhere = _builder.state("a status that nothing here leads to or from")

_new.upon(Inputs.commission).to(_commissioning).returns(NodeStatus.COMMISSIONING)
_new.upon(Inputs.mark_broken).to(_broken).returns(NodeStatus.BROKEN)

_commissioning.upon(Inputs.commissioned).to(_ready).returns(NodeStatus.READY)
_commissioning.upon(Inputs.begin_testing).to(_testing_commissioned).returns(NodeStatus.TESTING)
_commissioning.upon(Inputs.fail).to(_failed_commissioning).returns(NodeStatus.FAILED_COMMISSIONING)
# What is known of it may be half of the old and half of the new, so it is as good as new.
_commissioning.upon(Inputs.abort).to(_new).returns(NodeStatus.NEW)
_commissioning.upon(Inputs.mark_broken).to(_broken).returns(NodeStatus.BROKEN)

_failed_commissioning.upon(Inputs.commission).to(_commissioning).returns(NodeStatus.COMMISSIONING)
_failed_commissioning.upon(Inputs.test).to(_testing_failed).returns(NodeStatus.TESTING)
_failed_commissioning.upon(Inputs.mark_broken).to(_broken).returns(NodeStatus.BROKEN)

_ready.upon(Inputs.commission).to(_commissioning).returns(NodeStatus.COMMISSIONING)
_ready.upon(Inputs.test).to(_testing_ready).returns(NodeStatus.TESTING)
_ready.upon(Inputs.mark_broken).to(_broken_commissioned).returns(NodeStatus.BROKEN)

_testing_commissioned.upon(Inputs.tested).to(_ready).returns(NodeStatus.READY)
_testing_commissioned.upon(Inputs.fail).to(_failed_testing).returns(NodeStatus.FAILED_TESTING)
_testing_commissioned.upon(Inputs.abort).to(_new).returns(NodeStatus.NEW)
_testing_commissioned.upon(Inputs.mark_broken).to(_broken).returns(NodeStatus.BROKEN)

_testing_ready.upon(Inputs.tested).to(_ready).returns(NodeStatus.READY)
_testing_ready.upon(Inputs.fail).to(_failed_testing).returns(NodeStatus.FAILED_TESTING)
_testing_ready.upon(Inputs.abort).to(_ready).returns(NodeStatus.READY)
_testing_ready.upon(Inputs.mark_broken).to(_broken).returns(NodeStatus.BROKEN)

_testing_again.upon(Inputs.tested).to(_ready).returns(NodeStatus.READY)
_testing_again.upon(Inputs.fail).to(_failed_testing).returns(NodeStatus.FAILED_TESTING)
_testing_again.upon(Inputs.abort).to(_failed_testing).returns(NodeStatus.FAILED_TESTING)
_testing_again.upon(Inputs.mark_broken).to(_broken).returns(NodeStatus.BROKEN)

# Good tests do not make up for what is not known of the node; and one that is "Failed testing" was commissioned.
_testing_failed.upon(Inputs.tested).to(_new).returns(NodeStatus.NEW)
_testing_failed.upon(Inputs.fail).to(_failed_commissioning).returns(NodeStatus.FAILED_COMMISSIONING)
_testing_failed.upon(Inputs.abort).to(_failed_commissioning).returns(NodeStatus.FAILED_COMMISSIONING)
_testing_failed.upon(Inputs.mark_broken).to(_broken).returns(NodeStatus.BROKEN)

_failed_testing.upon(Inputs.commission).to(_commissioning).returns(NodeStatus.COMMISSIONING)
_failed_testing.upon(Inputs.test).to(_testing_again).returns(NodeStatus.TESTING)
_failed_testing.upon(Inputs.mark_broken).to(_broken_commissioned).returns(NodeStatus.BROKEN)

_broken.upon(Inputs.commission).to(_commissioning).returns(NodeStatus.COMMISSIONING)
_broken.upon(Inputs.mark_fixed).to(_new).returns(NodeStatus.NEW)
_broken_commissioned.upon(Inputs.commission).to(_commissioning).returns(NodeStatus.COMMISSIONING)
_broken_commissioned.upon(Inputs.mark_fixed).to(_ready).returns(NodeStatus.READY)

Machine = _builder.build()

_STATES: Final = {
    NodeStatus.NEW: _new,
    NodeStatus.COMMISSIONING: _commissioning,
    NodeStatus.FAILED_COMMISSIONING: _failed_commissioning,
    NodeStatus.READY: _ready,
    NodeStatus.FAILED_TESTING: _failed_testing,
}

_TESTING: Final = {
    NodeStatus.COMMISSIONING: _testing_commissioned,
    NodeStatus.READY: _testing_ready,
    NodeStatus.FAILED_TESTING: _testing_again,
}

_BROKEN: Final = {NodeStatus.READY: _broken_commissioned, NodeStatus.FAILED_TESTING: _broken_commissioned}

BUSY: Final = frozenset({NodeStatus.COMMISSIONING, NodeStatus.TESTING})
"""Statuses in which scripts run on the node, and it is expected to talk."""


def next_status(status: NodeStatus, previous: NodeStatus, given: Input) -> NodeStatus:
    """The status that a node has after ``given``, if it is ``status`` and was ``previous`` before that.

    :raises NotAllowed: if that cannot happen to such a node.
    """
    try:
        return _take(status, previous, given)
    except NoTransition:
        raise NotAllowed(status, given, allowed(status, previous)) from None


@cache
def allowed(status: NodeStatus, previous: NodeStatus) -> frozenset[Input]:
    """All that can happen to a node that is ``status`` and was ``previous`` before that."""
    return frozenset(each for each in Input if _takes(status, previous, each))


def _takes(status: NodeStatus, previous: NodeStatus, given: Input) -> bool:
    try:
        _take(status, previous, given)
    except NoTransition:
        return False
    return True


def _take(status: NodeStatus, previous: NodeStatus, given: Input) -> NodeStatus:
    machine = Machine(_Nothing(), _state(status, previous))
    result: NodeStatus = getattr(machine, given.value)()
    return result


def _state(status: NodeStatus, previous: NodeStatus) -> Any:
    """The state of the machine that what is stored stands for."""
    if status is NodeStatus.TESTING:
        return _TESTING.get(previous, _testing_failed)
    if status is NodeStatus.BROKEN:
        return _BROKEN.get(previous, _broken)
    return _STATES.get(status, _elsewhere)
