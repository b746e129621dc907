"""Faults of ranks during a run: one is killed and started again, one is stopped, a link is cut."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.tools.lab.cluster import Cluster
from thinwire.tools.lab.errors import LabError

_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0}
_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m)")
_BEGINS = {"kill": "killed", "stop": "stopped", "cut": "cut off"}
_ENDS = {"kill": "started again", "stop": "continued", "cut": "connected again"}


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
        """When it ends, in seconds after the start of the run."""
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


def check_faults(faults: Sequence[RankFault], cluster: Cluster, *, emulated: bool) -> None:
    """Raise `LabError` unless the faults fit the cluster and each other."""
    by_victim: dict[tuple[bool, int], list[RankFault]] = {}
    for fault in faults:
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
    """Return the events to come, in order."""
    begin = [Happening(f.at_seconds, f.rank, _BEGINS[f.kind]) for f in faults]
    end = [Happening(f.until, f.rank, _ENDS[f.kind]) for f in faults if f.for_seconds is not None]
    return sorted([*begin, *end], key=lambda x: x.seconds)
