"""Applies the requested faults to ranks, when their time has come."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

from thinwire.lab.faults import Happening, RankFault, happenings
from thinwire.lab.ranks import RankProcesses

_SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "continued": signal.SIGCONT}


class FaultTimeline:
    """The faults of one run.

    Args:
        faults: faults to apply.
        ranks: the processes that they hit.
        carry: lets the link of a rank carry packets, or none.
        tell: called with each event that happened.

    Attributes:
        began: the point on ``time.monotonic`` from which times count; None: not started yet.
        happened: events so far, with their actual times.
        left: events still to come.
    """

    def __init__(
        self,
        faults: Sequence[RankFault],
        ranks: RankProcesses,
        carry: Callable[[int, bool], None],
        tell: Callable[[Happening], None],
    ) -> None:
        self.began: float | None = None
        self.happened: list[Happening] = []
        self.left = happenings(faults)
        self._ranks, self._carry, self._tell = ranks, carry, tell
        self._killed: set[int] = set()

    def until(self, now: float) -> None:
        """Apply what is due by now. Faults of a rank that has ended are skipped."""
        seconds = -1.0 if self.began is None else now - self.began
        while self.left and self.left[0].seconds <= seconds:
            due = self.left.pop(0)
            if self._does(due):
                done = Happening(round(seconds, 3), due.rank, due.what)
                self.happened.append(done)
                self._tell(done)

    def _does(self, due: Happening) -> bool:
        rank, what = due.rank, due.what
        if what in ("cut off", "connected again"):
            self._carry(rank, what == "connected again")
        elif what == "started again":
            if rank not in self._killed:
                return False
            self._killed.remove(rank)
            self._ranks.start_again(rank)
        elif self._ranks.exit_codes[rank] is None:
            self._ranks.signal(_SIGNALS[what], rank)
            if what == "killed":
                self._killed.add(rank)
        else:
            return False
        return True

    @property
    def all_dead_for_now(self) -> bool:
        """Return whether all ranks are killed and at least one of them will be started again."""
        comes = any(one.what == "started again" and one.rank in self._killed for one in self.left)
        return comes and len(self._killed) == len(self._ranks.exit_codes)

    def unasked(self, exit_codes: Sequence[int | None]) -> list[int | None]:
        """Return the exit codes without the intended deaths."""
        return [0 if rank in self._killed and code is not None else code for rank, code in enumerate(exit_codes)]
