"""Which method wins where: a grid over link rates and numbers of workers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from thinwire.core.pricing.costs import Costs
from thinwire.core.pricing.profiles import ModelProfile
from thinwire.core.program import Topology
from thinwire.core.records import UNREADABLE
from thinwire.predict.choose.rank import Candidates, judge, price, without_startups
from thinwire.predict.choose.worth import WorthOf
from thinwire.predict.timeline import bound_by

BITS_PER_SECOND = (1e8, 1e9, 1e10, 2.5e10, 1e11)
WORKERS = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Cell:
    """One cluster.

    Attributes:
        winner: label of the recommendation.
        winner_exact: label of the recommendation without lossy methods.
        step_seconds: step time of the winner.
        loss_seconds: the same, times the steps that it needs for one step of plain averaging.
        dense_seconds: step time of the fastest dense form.
        why: the sentence of ``choose``, and what bounds the dense form.
    """

    winner: str
    winner_exact: str
    step_seconds: float
    loss_seconds: float
    dense_seconds: float
    why: str


@dataclass(frozen=True)
class Map:
    """``cells[i][j]`` belongs to ``bits_per_second[i]`` and ``workers[j]``."""

    bits_per_second: tuple[float, ...]
    workers: tuple[int, ...]
    cells: tuple[tuple[Cell, ...], ...]

    def to_data(self) -> dict[str, Any]:
        """Return the map as data that JSON can hold."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]

    def to_json(self) -> str:
        """Return the map as JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Map:
        """Read back what ``to_json`` wrote.

        Raises:
            ValueError: the text holds no map.
        """
        try:
            data: Any = json.loads(text)
            cells = tuple(tuple(Cell(**cell) for cell in row) for row in data["cells"])
            return cls(tuple(map(float, data["bits_per_second"])), tuple(map(int, data["workers"])), cells)
        except UNREADABLE as error:
            raise ValueError(f"this is not a thinwire map: {error}") from error


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
        candidates: (label, method) pairs.
        model_profile: profile of the model.
        bits_per_second: link rates.
        workers: total numbers of ranks.
        costs: returns the prices for a rate and a cluster, for example from ``Costs.of_link``.
        ranks_per_node: ranks of each machine.
        backend: see ``choose``.
        shared_compute: see ``choose``.
        lossy, worth: see ``choose``.
        on_cell: called after each cell with the number done and the total.

    Raises:
        ValueError: as in ``choose``, or workers that do not fill the machines.
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
            best, exact = verdict.best, verdict.best_exact
            row.append(Cell(best.label, exact.label, best.seconds, best.loss_seconds, dense.seconds, why))
            on_cell(i * len(clusters) + len(row), len(bits_per_second) * len(clusters))
        rows.append(tuple(row))
    return Map(tuple(map(float, bits_per_second)), tuple(workers), tuple(rows))
