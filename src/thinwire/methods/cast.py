"""Cast: the average on a 16-bit wire, half the bytes of S-SGD, no state; or on an 8-bit one, a quarter.

Code that does the same: torch's ``fp16_compress_hook`` and ``bf16_compress_hook``.

Differences from these hooks: the gradient is divided by the world size in fp32 before the cast, so that an fp16 sum
cannot overflow where the mean does not. No residual: it works in the units it finds, and scaled fp16 gradients sit
where fp16 is accurate.

``Cast("int8")`` is 8-bit linear quantisation, and another program (``linear8.py``): blocks of A = M + E with the
scale max|a| / 127, all-to-all of codes, sum in fp32, encoded again, all-gather. Its traffic does not grow with the
number of ranks, where torch's 8-bit hooks gather everybody's codes; and it keeps the error of both steps in a
residual, where those drop it. Chunks follow the bucket, so that values depend on the plan; the state does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from thinwire.methods import linear8
from thinwire.methods.base import all_reduce as sum_over_ranks
from thinwire.methods.base import check_count, check_flag, check_fusion
from thinwire.methods.decoupling import Decoupling, check_decoupling, decoupled_sum
from thinwire.methods.exchanges import check_collective
from thinwire.methods.prices import COPY, IN_PLACE, Prices, elements
from thinwire.planner.costs import Costs
from thinwire.program import Bucket, Method, Program, State, Topology

_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "int8": torch.int8,
}


@dataclass(frozen=True)
class Cast(Decoupling, Method):
    """Average in 16 or 8 bits.

    Args:
        dtype: ``torch.bfloat16`` or ``torch.float16``, or "bf16" or "fp16"; or ``torch.int8``, "int8".
        block: elements that share a scale, with int8.
        fusion: MiB, "none", "single", "optimal", "tune", a published rule, a ``Merge`` or "auto".
        deterministic: sum in rank order: equal bits under any plan; not with int8.
        collective, decoupled, check_finite, update_in_step, poison_stale: as of :class:`~thinwire.methods.ssgd.SSGD`.
    """

    name: ClassVar[str] = "cast"
    cheap_pack: ClassVar[bool] = True
    loss: ClassVar[str] = "rounded to 16 bits"
    candidates: ClassVar[tuple[Mapping[str, Any], ...]] = ({"dtype": "bf16"},)
    auto: ClassVar[tuple[int, Mapping[str, Any]] | None] = (1, {"dtype": "bf16"})

    dtype: torch.dtype | str = torch.bfloat16
    block: int = 256
    fusion: Any = "auto"
    deterministic: bool = False
    collective: str = "flat"

    def __post_init__(self) -> None:
        dtype = _DTYPES.get(self.dtype) if isinstance(self.dtype, str) else self.dtype
        if dtype not in _DTYPES.values():
            raise ValueError(
                f"dtype={self.dtype!r} is unknown; use torch.bfloat16 ('bf16'), torch.float16 ('fp16') or torch.int8"
            )
        object.__setattr__(self, "dtype", dtype)
        check_fusion(self.fusion)
        check_flag("deterministic", self.deterministic)
        check_count("block", self.block, 8)
        if self.block % 8:
            raise ValueError(f"block={self.block!r} must be a multiple of 8")
        if dtype == torch.int8:
            if self.deterministic:
                raise ValueError(
                    "deterministic=True cannot hold with int8, whose blocks follow the bucket; leave it out"
                )
            if self.decoupled or self.collective != "flat":
                raise ValueError("int8 has two steps of its own: leave out decoupled=True and collective=")
            object.__setattr__(self, "has_residual", True)
            object.__setattr__(self, "cheap_pack", False)
        check_collective(self.collective, deterministic=self.deterministic)
        check_decoupling(self, collective=self.collective)

    def payload(self, shapes: Sequence[Sequence[int]], phase: int) -> list[int]:
        """Half an fp32 element per element; with int8 a quarter, and the scales."""
        sizes = super().payload(shapes, phase)
        return linear8.payload(sizes, self.block) if self.dtype == torch.int8 else [-(-size // 2) for size in sizes]

    def sums(self, shape: Sequence[int]) -> bool:
        """In 16 bits."""
        return self.dtype != torch.int8

    def compute_seconds(
        self, shapes: Sequence[Sequence[int]], phase: int, topology: Topology, costs: Costs
    ) -> list[float]:
        """Into the bucket, division and cast; the cast back."""
        size, prices = elements(shapes), Prices(costs, topology.world_size, topology)
        if not size:
            return [0.0]
        if self.dtype == torch.int8:
            return linear8.seconds(size, topology.world_size, prices)
        cast = 1.5  # one side has half the bytes
        before, after = prices.passes(COPY + IN_PLACE + cast, size), prices.passes(cast, size)
        if self.decoupled:
            return prices.decoupled(before, after, size, itemsize=2)
        return prices.summed(
            before, after, size, deterministic=self.deterministic, itemsize=2, collective=self.collective
        )

    def reduce(self, bucket: Bucket, state: State) -> Program:
        """One all-reduce of 16-bit elements; with int8 an all-to-all and an all-gather."""
        assert isinstance(self.dtype, torch.dtype)
        if bucket.numel == 0:
            return
        if self.dtype == torch.int8:
            yield from linear8.two_step(bucket, state, self.block)
            return
        flat = bucket.flat if bucket.flat.element_size() >= 4 else bucket.flat.float()
        message = bucket.mark_used(flat.div_(state.size).to(self.dtype))
        if self.decoupled:
            bucket.write((yield from decoupled_sum(message, state)))
            return
        bucket.write(
            (yield from sum_over_ranks(message, state, deterministic=self.deterministic, collective=self.collective))
        )
