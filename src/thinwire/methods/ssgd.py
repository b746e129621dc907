"""S-SGD: the plain average, overlapped with backward. The baseline of everything else.

Paper: wait-free backpropagation (Zhang et al., Poseidon, 2017) with tensor fusion (Shi et al., MG-WFBP, 1811.11141).

Differences from the papers: buckets launch in plan order on every rank; gradients are divided before the sum, so that
16 bits cannot overflow; ``ordered=True`` adds in rank order, so that bits do not depend on bucket boundaries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from thinwire.methods.base import average_flat, check_merge
from thinwire.methods.prices import Prices, elements
from thinwire.planner.costs import Costs
from thinwire.program import Bucket, Method, Program, State, Topology


@dataclass(frozen=True)
class SSGD(Method):
    """Exact averaging.

    Args:
        merge: fusion: MiB, "none", "single", "optimal", a published rule, a ``Merge`` or "auto".
        ordered: sum in rank order (reduce-scatter and all-gather): equal bits under any plan.
    """

    name: ClassVar[str] = "ssgd"
    light: ClassVar[bool] = True
    exact: ClassVar[bool] = True
    merge: Any = "auto"
    ordered: bool = False

    def __post_init__(self) -> None:
        check_merge(self.merge)

    def compute_seconds(
        self, shapes: Sequence[Sequence[int]], phase: int, topology: Topology, costs: Costs
    ) -> list[float]:
        """Into the bucket, divided."""
        return Prices(costs, topology.world_size).average_flat(elements(shapes), ordered=self.ordered)

    def reduce(self, bucket: Bucket, state: State) -> Program:
        """One all-reduce of the gradients over the world size."""
        yield from average_flat(bucket, state, ordered=self.ordered)
