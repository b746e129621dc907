"""Statistics of a KFAC, as data."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

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


class Tally:
    def __init__(self, channel: Channel) -> None:
        self.steps = self.inverse_updates = 0
        self.clip: Tensor | None = None
        self._channel, self._before = channel, (0, 0)
        self._seconds, self._waited = defaultdict[str, float](float), defaultdict[str, float](float)
        self._issued, self._bytes = Counter[str](), Counter[str]()

    def phase(self, name: str, work: Callable[[], float]) -> None:
        """Time work that returns how long it waited; assign to it what the channel has issued since the last phase."""
        started = time.perf_counter()
        waited = work()
        self._seconds[name] += time.perf_counter() - started - waited
        self._waited[name] += waited
        ledger, before = self._channel.ledger, self._before
        self._before = sum(ledger.issued.values()), ledger.total
        self._issued[name] += self._before[0] - before[0]
        self._bytes[name] += self._before[1] - before[1]

    def stats(self, plan: KFACPlan, factor_updates: int, capture_seconds: float, levels: dict[str, int]) -> KFACStats:
        seconds, waited = self._seconds, self._waited
        clip = None if self.clip is None else float(self.clip)
        return KFACStats(
            plan.schedule, plan.hash, len(plan.layers), self.steps, factor_updates, self.inverse_updates,
            dict(self._issued), dict(self._bytes), capture_seconds, waited["factors"], seconds["inverses"],
            waited["inverses"], seconds["returns"], waited["returns"], levels, clip,
        )  # fmt: skip
