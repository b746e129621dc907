"""Which method wins where: a grid over link rates and workers, and the workers from which on a method stops scaling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from thinwire.core.pricing.costs import Costs
from thinwire.core.pricing.profiles import ModelProfile
from thinwire.core.program import Method, Topology
from thinwire.core.records import Record
from thinwire.predict.choose.rank import Candidates, alone_seconds, answer, judge, price, without_startups
from thinwire.predict.choose.worth import WorthOf, resolved
from thinwire.predict.timeline import bound_by, simulate

BITS_PER_SECOND = (1e8, 1e9, 1e10, 2.5e10, 1e11)
WORKERS = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Cell:
    """One cluster.

    Attributes:
        winner, winner_exact: label of the recommendation, which may be one worker alone; and of the best exact method.
        step_seconds: of the winner.
        loss_seconds: the same, times the steps that it needs for one step of plain averaging.
        dense_seconds: step time of the fastest dense form.
        alone_seconds: of one worker alone, for what all gain by one step of plain averaging.
        why: the sentence of ``choose``, and what bounds the dense form.
    """

    winner: str
    winner_exact: str
    step_seconds: float
    loss_seconds: float
    dense_seconds: float
    alone_seconds: float
    why: str

    @property
    def worth(self) -> float:
        """How many times as soon as one worker alone all of them reach a loss."""
        return self.alone_seconds / self.loss_seconds if self.loss_seconds > 0 else 1.0


@dataclass(frozen=True)
class Map(Record):
    """``cells[i][j]`` belongs to ``bits_per_second[i]`` and ``workers[j]``."""

    called: ClassVar[str] = "a thinwire map"
    alone: ClassVar[bool] = False

    bits_per_second: tuple[float, ...]
    workers: tuple[int, ...]
    cells: tuple[tuple[Cell, ...], ...]


def map_of(
    candidates: Candidates,
    model_profile: ModelProfile,
    bits_per_second: Sequence[float] = BITS_PER_SECOND,
    workers: Sequence[int] = WORKERS,
    *,
    costs: Callable[[float, Topology], Costs],
    ranks_per_node: int = 1,
    backend: str = "gloo",
    shared_compute: bool = True,
    lossy: bool = True,
    worth: WorthOf | None = None,
    on_cell: Callable[[int, int], None] = lambda done, total: None,
) -> Map:
    """Return the recommendation of ``choose`` for every rate and number of workers.

    Args:
        costs: returns the prices for a rate and a cluster, for example from ``Costs.of_link``.
        backend, shared_compute, lossy, worth: see ``choose``.
        on_cell: called after each cell with the number done and the total.
    """
    where: dict[str, Any] = {"backend": backend, "shared_compute": shared_compute}
    clusters = [Topology(count, ranks_per_node) for count in workers]
    rows = []
    for i, bits in enumerate(bits_per_second):
        row = []
        for topology in clusters:
            prices = costs(bits, topology)
            points, _ = price(candidates, model_profile, topology, prices, where, lossy=lossy, worth=worth)
            alone = without_startups(model_profile, topology, prices, where)
            verdict = judge(points, topology, alone, lossy=lossy)
            dense = verdict.dense
            bound = bound_by(dense.method, model_profile, topology, prices, plan=dense.timeline.plan, **where)
            why = f"{verdict.sentence}; {dense.label} is bound by {bound}"
            best, exact = answer(points, verdict.best), verdict.best_exact
            lone = alone_seconds(points) or best.loss_seconds
            row.append(Cell(best.label, exact.label, best.seconds, best.loss_seconds, dense.seconds, lone, why))
            on_cell(i * len(clusters) + len(row), len(bits_per_second) * len(clusters))
        rows.append(tuple(row))
    return Map(tuple(map(float, bits_per_second)), tuple(workers), tuple(rows))


Prices: TypeAlias = Costs | Callable[[Topology], Costs]
"""Costs, scaled by the formulas to other numbers of ranks, or a function that returns them."""


def knee(
    method: Method,
    model_profile: ModelProfile,
    costs: Prices,
    *,
    ranks_per_node: int = 1,
    backend: str = "gloo",
    shared_compute: bool = True,
    efficiency: float = 0.8,
    most: int = 4096,
    worth: WorthOf | None = None,
) -> int | None:
    """Find the smallest number of workers whose efficiency lies below a limit.

    Efficiency is t(1) / t(P): forward and backward alone over the predicted step, with the same batch per rank.
    Machines are whole: the answer is a multiple of ``ranks_per_node``. It is found by doubling, then bisection, which
    assumes that efficiency falls with P.

    Args:
        method: simulated at each number of workers, with its default buckets.
        costs: costs of exchanges and compute, or a function of the topology.
        backend, shared_compute: see ``simulate``.
        efficiency: the limit, in (0, 1].
        most: largest number of workers to try.
        worth: see ``choose``; used to find a period for local steps without one.

    Returns:
        The number; None if efficiency stays above the limit up to ``most``.
    """
    if not 0 < efficiency <= 1:
        raise ValueError(f"efficiency must be in (0, 1], not {efficiency}")
    if ranks_per_node < 1 or most < ranks_per_node:
        raise ValueError(f"ranks_per_node={ranks_per_node} must be from 1 to most={most}")
    alone = model_profile.forward_seconds + sum(model_profile.backward_seconds)

    def bends(nodes: int) -> bool:
        workers = nodes * ranks_per_node
        if workers == 1:
            return False
        topology = Topology(workers, ranks_per_node)
        priced = costs if isinstance(costs, Costs) else costs(topology)
        where: dict[str, Any] = {"backend": backend, "shared_compute": shared_compute}
        ran = resolved(method, model_profile, topology, priced, worth=worth, **where)
        step = simulate(ran, model_profile, topology, priced, **where).step_seconds
        return alone < efficiency * step

    last = most // ranks_per_node
    good, bad = 0, 1
    while not bends(bad):
        if bad == last:
            return None
        good, bad = bad, min(2 * bad, last)
    while bad - good > 1:
        middle = (good + bad) // 2
        if bends(middle):
            bad = middle
        else:
            good = middle
    return bad * ranks_per_node
