"""What starts an update: whether enough work has arrived, and which nodes are asked for it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from thinwire.systems.parameter_server.effects import Contribution
from thinwire.systems.parameter_server.settings import Settings
from thinwire.systems.parameter_server.staleness import UNBOUNDED
from thinwire.systems.parameter_server.table import Member


def arrived(settings: Settings, came: Collection[int], parts: Iterable[Contribution]) -> int:
    """Return how much pushed work has arrived, in the units of ``update_every``.

    Args:
        settings: of the run.
        came: members that pushed.
        parts: the contributions that will be used.
    """
    return len(came) if settings.counts_nodes else sum(len(part.rows) for part in parts)


def chosen(settings: Settings, fresh: Iterable[Member], needed: int) -> set[int]:
    """Return the numbers of the members whose sums the update asks for."""
    if settings.pull == "fresh":
        return {m.number for m in fresh}
    taken: set[int] = set()
    for member in sorted(fresh, key=lambda m: (m.buf_low, m.number)):
        if needed > 0:
            taken.add(member.number)
            needed -= 1 if settings.counts_nodes else member.seen - member.ack
    return taken


def all_stand(settings: Settings, came: Collection[int], members: Iterable[Member]) -> bool:
    """Return whether all members wait for a pushed update at S = 0.

    Pushes at S = 0 are answered after the update, so if nobody can send more, what has arrived must be enough.
    """
    held = settings.transfer == "push" and settings.max_staleness == 0
    return held and bool(came) and all(m.low == UNBOUNDED for m in members)


class Grace:
    """Lets an update that could begin wait ``seconds`` for more nodes to finish; 0: not at all."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: float | None = None

    def holds(self, now: float, came: Collection[int], members: Collection[int]) -> bool:
        """Return whether the update should still wait; the time starts with the first call."""
        if not self._seconds or len(came) == len(members):
            return False
        if self._until is None:
            self._until = now + self._seconds
        return now < self._until

    def ends(self, now: float) -> bool:
        """Return whether the waiting time has started and is over."""
        return self._until is not None and now >= self._until

    def close(self) -> None:
        self._until = None
