"""Rounds of the nodes: how far ahead a node may run (SSP), and how many local steps a slower node makes."""

from __future__ import annotations

from collections.abc import Iterable

from thinwire.systems.parameter_server.settings import Settings
from thinwire.systems.parameter_server.staleness import UNBOUNDED
from thinwire.systems.parameter_server.submit import LocalSteps
from thinwire.systems.parameter_server.table import Member


def slowest(members: Iterable[Member]) -> int:
    """Return the rounds of the slowest node. One round is one submission from each of its workers."""
    return min((m.clock // m.workers for m in members), default=0)


def allowed(settings: Settings, member: Member, members: Iterable[Member]) -> int:
    """Return the last start (in the member's own count) that keeps it no more than ``clock_limit`` rounds ahead."""
    if settings.clock_limit is None:
        return UNBOUNDED
    return (slowest(members) + settings.clock_limit + 1) * member.workers - 1 - member.offset


def steps(settings: Settings, member: Member, members: Iterable[Member]) -> int:
    """Return the number of batches in a member's next submission; balanced local steps give slower nodes fewer."""
    update = settings.local_update
    if not (isinstance(update, LocalSteps) and update.balance and member.step_us):
        return update.steps
    fastest = min(m.step_us for m in members if m.step_us)
    return max(1, update.steps * fastest // member.step_us)
