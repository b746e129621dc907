"""Statistics of a KFAC, as data."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from thinwire.engine.session import Channel
from thinwire.systems.kfac.plan import KFACPlan


@dataclass(frozen=True)
class KFACStats:
    """Counters since the KFAC was created; seconds are this rank's, by the host's clock; bytes are its share of a ring.

    Attributes:
        schedule: in use. plan_hash: of the plan in force. layers: how many are preconditioned.
        steps: gradients preconditioned. factor_updates, inverse_updates: exchanges of statistics, updates of inverses.
        collectives, bytes_sent: by phase: "factors", "inverses", "returns".
        capture_seconds: computing statistics, during the passes. factor_wait_seconds: waiting for their exchange, in
            ``step``.
        invert_seconds: inverting. inverse_wait_seconds: waiting for others' inverses. precondition_seconds:
            preconditioning.
        return_wait_seconds: waiting for gradients that others precondition.
        levels: factor -> level that its last inversion needed (see :mod:`thinwire.kernels.inverse`), if not 0.
        clip: the last factor of the KL clip; None: there was none.
    """

    schedule: str
    plan_hash: str
    layers: int
    steps: int = 0
    factor_updates: int = 0
    inverse_updates: int = 0
    collectives: dict[str, int] = field(default_factory=dict)
    bytes_sent: dict[str, int] = field(default_factory=dict)
    capture_seconds: float = 0.0
    factor_wait_seconds: float = 0.0
    invert_seconds: float = 0.0
    inverse_wait_seconds: float = 0.0
    precondition_seconds: float = 0.0
    return_wait_seconds: float = 0.0
    levels: dict[str, int] = field(default_factory=dict)
    clip: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return dataclasses.asdict(self)


@dataclass
class Spent:
    """One phase of one step: seconds spent waiting for other ranks."""

    waited: float = 0.0


class Tally:
    """Collects the counters."""

    def __init__(self) -> None:
        self.steps = self.inverse_updates = 0
        self.clip: Tensor | None = None
        self._seconds, self._waited = defaultdict[str, float](float), defaultdict[str, float](float)
        self._issued, self._bytes = Counter[str](), Counter[str]()
        self._ledgers: dict[int, tuple[int, int]] = {}

    @contextmanager
    def phase(self, name: str, channel: Channel) -> Iterator[Spent]:
        """Time the body, and assign to it what the channel has issued since the last phase."""
        spent, started = Spent(), time.perf_counter()
        yield spent
        self._seconds[name] += time.perf_counter() - started - spent.waited
        self._waited[name] += spent.waited
        now = sum(channel.ledger.issued.values()), channel.ledger.total
        before = self._ledgers.get(id(channel), (0, 0))
        self._ledgers[id(channel)] = now
        self._issued[name] += now[0] - before[0]
        self._bytes[name] += now[1] - before[1]

    def stats(
        self, plan: KFACPlan, *, factor_updates: int, capture_seconds: float, levels: Mapping[str, int]
    ) -> KFACStats:
        return KFACStats(
            schedule=plan.schedule,
            plan_hash=plan.hash,
            layers=len(plan.layers),
            steps=self.steps,
            factor_updates=factor_updates,
            inverse_updates=self.inverse_updates,
            collectives=dict(self._issued),
            bytes_sent=dict(self._bytes),
            capture_seconds=capture_seconds,
            factor_wait_seconds=self._waited["factors"],
            invert_seconds=self._seconds["inverses"],
            inverse_wait_seconds=self._waited["inverses"],
            precondition_seconds=self._seconds["returns"],
            return_wait_seconds=self._waited["returns"],
            levels=dict(levels),
            clip=None if self.clip is None else float(self.clip),
        )
