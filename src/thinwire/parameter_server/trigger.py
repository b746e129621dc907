"""What begins an update: whether enough work has come, and whom to ask for it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from thinwire.parameter_server.effects import Contribution
from thinwire.parameter_server.settings import Settings
from thinwire.parameter_server.staleness import UNBOUNDED
from thinwire.parameter_server.table import Member


def arrived(settings: Settings, came: Collection[int], parts: Iterable[Contribution]) -> int:
    """Work that was pushed, in what ``update_every`` counts.

    Args:
        settings: of the run.
        came: members who pushed.
        parts: what of it is used.
    """
    return len(came) if settings.counts_nodes else sum(len(part.rows) for part in parts)


def chosen(settings: Settings, fresh: Iterable[Member], needed: int) -> set[int]:
    """Numbers of the members whose sums the update asks for."""
    if settings.pull == "fresh":
        return {m.number for m in fresh}
    taken: set[int] = set()
    for member in sorted(fresh, key=lambda m: (m.buf_low, m.number)):
        if needed > 0:
            taken.add(member.number)
            needed -= 1 if settings.counts_nodes else member.seen - member.ack
    return taken


def all_stand(settings: Settings, came: Collection[int], members: Iterable[Member]) -> bool:
    """Pushes at S = 0 are answered after the update: what has come must do if nobody can send more."""
    held = settings.transfer == "push" and settings.max_staleness == 0
    return held and bool(came) and all(m.low == UNBOUNDED for m in members)


class Grace:
    """An update that could begin waits so long for more who have finished; 0: not at all."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: float | None = None

    def holds(self, now: float, came: Collection[int], members: Collection[int]) -> bool:
        """Whether to wait still; the time begins with the first call."""
        if not self._seconds or len(came) == len(members):
            return False
        if self._until is None:
            self._until = now + self._seconds
        return now < self._until

    def ends(self, now: float) -> bool:
        """Whether it has begun and is over."""
        return self._until is not None and now >= self._until

    def close(self) -> None:
        self._until = None
