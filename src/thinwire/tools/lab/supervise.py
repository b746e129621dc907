"""The course of a run: its faults, and how it ends: by itself, after a rank failed, when time is up, or on a signal."""

from __future__ import annotations

import itertools
import math
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from thinwire.tools.lab.cluster import Cluster, LabError
from thinwire.tools.lab.ranks import RankProcesses

_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0}
_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m)")
_BEGINS = {"kill": "killed", "stop": "stopped", "cut": "cut off"}
_ENDS = {"kill": "started again", "stop": "continued", "cut": "connected again"}
TIMED_OUT = 124
_TICK_SECONDS = 0.05
_KILL_AFTER_SECONDS = 5.0
_DEFERRED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PAUSE_SECONDS = 0.01  # of a slow rank at a time, at least
_SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "continued": signal.SIGCONT}


@dataclass(frozen=True)
class RankFault:
    """A fault.

    Attributes:
        kind: "kill" (SIGKILL), "stop" (SIGSTOP, then SIGCONT), or "cut" (the link of the rank's node carries nothing).
        rank: the rank that it hits.
        at_seconds: time after the start of the run.
        for_seconds: duration; after a kill, the rank's command is then started again. None (kills only): never.
    """

    kind: str
    rank: int
    at_seconds: float
    for_seconds: float | None = None

    @property
    def until(self) -> float:
        return math.inf if self.for_seconds is None else self.at_seconds + self.for_seconds


@dataclass(frozen=True)
class Happening:
    """An event of a rank, in seconds after the start: "killed", "started again", "stopped", ..."""

    seconds: float
    rank: int
    what: str


def parse_kills(texts: Sequence[str], restart: str | None) -> list[RankFault]:
    """Parse ``2:30s`` (rank 2 is killed at 30 s); ``restart``: such as ``5s``, after which it is started again.

    Raises:
        LabError: the text has another form.
    """
    if restart is not None and not texts:
        raise LabError(
            "--restart says when a killed rank is started again: say which rank with --kill, such as --kill 2:30s"
        )
    pause = None if restart is None else _time(restart, "--restart", restart, "5s")
    return [RankFault("kill", rank, at, pause) for rank, (at,) in (_parts(x, "--kill", ("30s",)) for x in texts)]


def parse_pauses(kind: str, texts: Sequence[str]) -> list[RankFault]:
    """Parse ``1:10s:3s``: at 10 s, for 3 s. ``kind``: "stop" or "cut"."""
    return [RankFault(kind, rank, *times) for rank, times in (_parts(x, f"--{kind}", ("10s", "3s")) for x in texts)]


def _parts(text: str, option: str, times: Sequence[str]) -> tuple[int, list[float]]:
    example = ":".join(["2", *times])
    rank, *rest = text.split(":")
    if not re.fullmatch("[0-9]+", rank) or len(rest) != len(times):
        meaning = "RANK:AT" if len(times) == 1 else "RANK:AT:FOR"
        raise LabError(f"{option} {text!r} is not {meaning}: use for example {option} {example}")
    return int(rank), [_time(part, option, text, example) for part in rest]


def _time(part: str, option: str, text: str, example: str) -> float:
    match = _TIME.fullmatch(part.strip().lower())
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if not seconds > 0:
        raise LabError(f"{option} {text!r}: {part!r} is not a time above 0 in ms, s or m: use {option} {example}")
    return seconds


def check_faults(faults: Sequence[RankFault], cluster: Cluster, slow: Mapping[int, float], *, emulated: bool) -> None:
    """Raise `LabError` unless the faults fit the cluster and each other; ``slow``: see :class:`SlowRanks`."""
    for rank, factor in slow.items():
        if not (0 <= rank < cluster.workers and 1 <= factor < math.inf):
            raise LabError(f"--slow {rank}:{factor:g} needs a rank of 0 to {cluster.workers - 1}, and at least 1 times")
    by_victim: dict[tuple[bool, int], list[RankFault]] = {}
    for fault in faults:
        if fault.kind == "stop" and fault.rank in slow:
            raise LabError(f"--stop and --slow both stop rank {fault.rank}: leave out one of them")
        if not 0 <= fault.rank < cluster.workers:
            raise LabError(
                f"--{fault.kind} names rank {fault.rank}, but the ranks are 0 to {cluster.workers - 1}: name another"
            )
        cut = fault.kind == "cut"
        if cut and not emulated:
            raise LabError("--cut needs emulated links, but the ranks run on plain loopback here: use --stop instead")
        by_victim.setdefault((cut, fault.rank // cluster.ranks_per_node if cut else fault.rank), []).append(fault)
    for some in by_victim.values():
        some.sort(key=lambda fault: fault.at_seconds)
        for one, other in itertools.pairwise(some):
            if other.at_seconds <= one.until:
                back = "for good (--restart S brings it back)" if one.until == math.inf else f"until {one.until:g} s"
                raise LabError(
                    f"--{other.kind} {other.rank}:{other.at_seconds:g}s hits a rank that is {_BEGINS[one.kind]} from "
                    f"{one.at_seconds:g} s {back}: choose times that do not overlap"
                )


def happenings(faults: Sequence[RankFault]) -> list[Happening]:
    begin = [Happening(f.at_seconds, f.rank, _BEGINS[f.kind]) for f in faults]
    end = [Happening(f.until, f.rank, _ENDS[f.kind]) for f in faults if f.for_seconds is not None]
    return sorted([*begin, *end], key=lambda x: x.seconds)


def supervise(
    ranks: RankProcesses,
    signals: DeferredSignals,
    timeline: FaultTimeline,
    *,
    grace_seconds: float,
    timeout_seconds: float | None,
) -> int:
    """Wait until all ranks have ended; return the worst code of those that ended by themselves, 124 if time was up.

    When a rank fails, the others have `grace_seconds`, then get SIGTERM, and five seconds later SIGKILL. When time is
    up or a signal arrived, they get SIGTERM at once; on a second signal SIGKILL. A death caused by the timeline is no
    failure.
    """
    began = time.monotonic()
    terminate_at = kill_at = math.inf
    by_itself: list[int | None] = []
    timed_out = terminated = False
    while ranks.running or (timeline.all_dead_for_now and not terminated):
        ranks.step(timeline.slow.tick_seconds)
        now = time.monotonic()
        timeline.slow.until(now)
        if not terminated:
            timeline.until(now)
        if any(timeline.unasked(ranks.exit_codes)):
            terminate_at = min(terminate_at, now + grace_seconds)
        if signals.received is not None:
            terminate_at = min(terminate_at, now)
        ended = not ranks.running and not timeline.all_dead_for_now
        if timeout_seconds is not None and now - began >= timeout_seconds and not terminated and not ended:
            timed_out, terminate_at = True, now
        if now >= terminate_at and not terminated:
            terminated, kill_at = True, now + _KILL_AFTER_SECONDS
            by_itself = timeline.unasked(ranks.exit_codes)
            ranks.signal(signal.SIGTERM)
        if now >= kill_at or signals.count > 1:
            ranks.signal(signal.SIGKILL)
    if timed_out:
        return TIMED_OUT
    codes = by_itself if terminated else timeline.unasked(ranks.exit_codes)
    return max((code or 0 for code in codes), default=0)


class DeferredSignals:
    """Hold back ctrl-C, SIGTERM and SIGHUP inside the context; the first one is raised again on exit.

    Python handles signals in the main thread only: in other threads this does nothing.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.count = 0
        self._former: dict[int, Any] = {}

    def __enter__(self) -> DeferredSignals:
        if threading.current_thread() is threading.main_thread():
            for number in _DEFERRED:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._former[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        self.count += 1

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        if self.received is not None:
            signal.raise_signal(self.received)


class SlowRanks:
    """Ranks that compute this many times slower, like an older machine: they are stopped for the rest of the time.

    Each time that one has run long enough to owe a pause, it is stopped (SIGSTOP, with its process group) until it has
    stood still ``factor - 1`` times as long as it ran; both are measured, so that late signals cancel out.
    """

    def __init__(self, factors: Mapping[int, float], ranks: RankProcesses) -> None:
        self.tick_seconds = _PAUSE_SECONDS / 4 if factors else _TICK_SECONDS
        self._factors, self._ranks = factors, ranks
        self._stands = dict.fromkeys(factors, False)
        self._seconds = {rank: [0.0, 0.0] for rank in factors}  # that it ran, and that it stood still
        self._before = time.monotonic()

    def until(self, now: float) -> None:
        passed, self._before = now - self._before, now
        for rank, factor in self._factors.items():
            if self._ranks.exit_codes[rank] is not None:
                self._stands[rank] = False
                continue
            stands, seconds = self._stands[rank], self._seconds[rank]
            seconds[stands] += passed
            owed = seconds[0] * (factor - 1) - seconds[1]
            if owed <= 0 if stands else owed >= _PAUSE_SECONDS:
                self._stands[rank] = not stands
                self._ranks.signal(signal.SIGCONT if stands else signal.SIGSTOP, rank)

    @property
    def stopped_shares(self) -> dict[int, float]:
        """The share of its life that each of them stood still."""
        return {rank: stood / max(1e-9, ran + stood) for rank, (ran, stood) in self._seconds.items()}


class FaultTimeline:
    """The faults of one run; times count from ``began`` on ``time.monotonic``, None: not started yet."""

    def __init__(
        self,
        faults: Sequence[RankFault],
        ranks: RankProcesses,
        carry: Callable[[int, bool], None],
        tell: Callable[[Happening], None],
        slow: Mapping[int, float],
    ) -> None:
        self.slow = SlowRanks(slow, ranks)
        self.began: float | None = None
        self.happened: list[Happening] = []
        self.left = happenings(faults)
        self._ranks, self._carry, self._tell = ranks, carry, tell
        self._killed: set[int] = set()

    def until(self, now: float) -> None:
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
        return [0 if rank in self._killed and code is not None else code for rank, code in enumerate(exit_codes)]
