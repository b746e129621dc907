"""S-SGD: the plain average, overlapped with backward. The baseline for everything else.

Paper: wait-free backpropagation (Zhang et al., Poseidon, 2017) with tensor fusion (Shi et al., MG-WFBP, 1811.11141).

Differences from the papers: buckets launch in plan order on every rank; gradients are divided before the sum, so that
16 bits cannot overflow; ``deterministic=True`` adds in rank order, so that bits do not depend on bucket boundaries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from thinwire.core.methods.base import average_flat, check_fusion
from thinwire.core.methods.decoupling import Decoupling, average_decoupled, check_decoupling
from thinwire.core.methods.exchanges import check_collective
from thinwire.core.methods.prices import Prices, elements
from thinwire.core.pricing.costs import Costs
from thinwire.core.program import Bucket, Method, Program, Shapes, State, Topology


@dataclass(frozen=True)
class SSGD(Decoupling, Method):
    """Exact averaging.

    Args:
        fusion: MiB, "none", "single", "optimal", "tune", a published rule, a ``Merge`` or "auto".
        deterministic: sum in rank order (reduce-scatter and all-gather): equal bits under any plan.
        collective: "flat"; over nodes of several ranks "three_phase" or "torus"; "auto": for each bucket the fastest by
            measured times (flat until the plan has them); "threshold:<MB>": three-phase up to that many MB, flat above.
        decoupled, check_finite, update_in_step, poison_stale: see :class:`~thinwire.methods.decoupling.Decoupling`.
    """

    name: ClassVar[str] = "ssgd"
    cheap_pack: ClassVar[bool] = True
    exact: ClassVar[bool] = True
    unfit: ClassVar[Mapping[str, str]] = {"federated": "it does not compress"}
    fusion: Any = "auto"
    deterministic: bool = False
    collective: str = "flat"

    def __post_init__(self) -> None:
        check_fusion(self.fusion)
        check_collective(self.collective, deterministic=self.deterministic)
        check_decoupling(self, collective=self.collective)

    def sums(self, shape: Sequence[int]) -> bool:
        return True

    def compute_seconds(self, shapes: Shapes, phase: int, topology: Topology, costs: Costs) -> list[float]:
        """Copy into the bucket and divide."""
        prices = Prices(costs, topology.world_size, topology)
        if self.decoupled:
            return prices.average_decoupled(elements(shapes))
        return prices.average_flat(elements(shapes), deterministic=self.deterministic, collective=self.collective)

    def reduce(self, bucket: Bucket, state: State) -> Program:
        """Do one all-reduce of the gradients over the world size; decoupled: in two halves."""
        if self.decoupled:
            yield from average_decoupled(bucket, state)
        else:
            yield from average_flat(bucket, state, deterministic=self.deterministic, collective=self.collective)
