"""Cast: the average on a 16-bit wire. Half the bytes of S-SGD, no state.

Code that does the same: torch's ``fp16_compress_hook`` and ``bf16_compress_hook``.

Differences from them: the gradient is divided by the world size in fp32 before the cast, so that an fp16 sum cannot
overflow where the mean does not. No residual: it works in the units it finds, and scaled fp16 gradients sit where
fp16 is accurate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from thinwire.methods.base import all_reduce as sum_over_ranks
from thinwire.methods.base import check_flag, check_merge
from thinwire.methods.prices import COPY, IN_PLACE, Prices, elements
from thinwire.planner.costs import Costs
from thinwire.program import Bucket, Method, Program, State, Topology

_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Cast(Method):
    """Average in 16 bits.

    Args:
        dtype: ``torch.bfloat16`` or ``torch.float16``, or "bf16" or "fp16".
        merge: fusion: MiB, "none", "single", "optimal", a published rule, a ``Merge`` or "auto".
        ordered: sum in rank order: equal bits under any plan.
    """

    name: ClassVar[str] = "cast"
    light: ClassVar[bool] = True

    dtype: torch.dtype | str = torch.bfloat16
    merge: Any = "auto"
    ordered: bool = False

    def __post_init__(self) -> None:
        dtype = _DTYPES.get(self.dtype) if isinstance(self.dtype, str) else self.dtype
        if dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"dtype={self.dtype!r} is unknown; use torch.bfloat16 ('bf16') or torch.float16 ('fp16')")
        object.__setattr__(self, "dtype", dtype)
        check_merge(self.merge)
        check_flag("ordered", self.ordered)

    def payload(self, shapes: Sequence[Sequence[int]], phase: int) -> list[int]:
        """Half an fp32 element per element."""
        return [-(-size // 2) for size in super().payload(shapes, phase)]

    def compute_seconds(
        self, shapes: Sequence[Sequence[int]], phase: int, topology: Topology, costs: Costs
    ) -> list[float]:
        """Into the bucket, division and cast; the cast back."""
        size, prices = elements(shapes), Prices(costs, topology.world_size)
        if not size:
            return [0.0]
        cast = 1.5  # one side has half the bytes
        before, after = prices.passes(COPY + IN_PLACE + cast, size), prices.passes(cast, size)
        return prices.summed(before, after, size, ordered=self.ordered, itemsize=2)

    def reduce(self, bucket: Bucket, state: State) -> Program:
        """One all-reduce of 16-bit elements."""
        assert isinstance(self.dtype, torch.dtype)
        if bucket.numel == 0:
            return
        flat = bucket.flat if bucket.flat.element_size() >= 4 else bucket.flat.float()
        message = flat.div_(state.size).to(self.dtype)
        bucket.write((yield from sum_over_ranks(message, state, ordered=self.ordered)))
