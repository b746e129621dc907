"""Cast: the average in 16 bits, half the bytes of S-SGD, no state; or in 8, 4, 2 or 1 bits.

Code that does the same: torch's ``fp16_compress_hook`` and ``bf16_compress_hook``.

Differences from these hooks: the gradient is divided by the world size in fp32 before the cast, so that an fp16 sum
cannot overflow if the mean does not. No residual: it works in the units it finds, and scaled fp16 gradients are in the
range where fp16 is accurate.

``Cast("int8")`` is 8-bit linear quantisation, and another program (``two_step.py``): blocks of A = M + E with the
scale max|a| / 127, all-to-all of codes, sum in fp32, encoded again, all-gather. ``"int4"`` is the same program with the
scale max|a| / 7, ``"int2"`` with four bins around 0, whose means are sent with the codes. Its traffic does not grow
with the number of ranks, whereas torch's 8-bit hooks gather all ranks' codes. It keeps the error of both steps in a
residual, which those hooks drop. Two ranks gather each other's codes, and so do more in ``"int1"``, with two bins.
Chunks follow the bucket, so values depend on the plan; the state does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from thinwire.core.checks import check_count, check_flag
from thinwire.core.methods import two_step
from thinwire.core.methods.base import all_reduce as sum_over_ranks
from thinwire.core.methods.base import check_fusion
from thinwire.core.methods.decoupling import Decoupling, check_decoupling, decoupled_sum
from thinwire.core.methods.exchanges import check_collective
from thinwire.core.methods.prices import COPY, IN_PLACE, Prices, elements
from thinwire.core.pricing.costs import Costs
from thinwire.core.program import Bucket, Method, Program, Shapes, State, Topology

_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "int8": torch.int8,
}
_BITS: Mapping[torch.dtype | str, int] = {torch.int8: 8, "int4": 4, "int2": 2, "int1": 1}


@dataclass(frozen=True)
class Cast(Decoupling, Method):
    """Average in 16, 8, 4, 2 or 1 bits.

    Args:
        dtype: ``torch.bfloat16`` or ``torch.float16``, or "bf16" or "fp16"; ``torch.int8`` or "int8", "int4", "int2",
            "int1".
        block: number of elements that share a scale, below 16 bits.
        fusion: MiB, "none", "single", "optimal", "tune", a published rule, a ``Merge`` or "auto".
        deterministic: sum in rank order: equal bits under any plan; not below 16 bits.
        collective, decoupled, check_finite, update_in_step, poison_stale: as for :class:`~thinwire.methods.ssgd.SSGD`.
    """

    name: ClassVar[str] = "cast"
    cheap_pack: ClassVar[bool] = True
    loss: ClassVar[str] = "rounded to 16 bits"
    candidates: ClassVar[tuple[Mapping[str, Any], ...]] = ({"dtype": "bf16"}, {"dtype": "int8"}, {"dtype": "int4"})
    auto: ClassVar[tuple[int, tuple[Mapping[str, Any], ...]] | None] = (1, candidates)

    dtype: torch.dtype | str = torch.bfloat16
    block: int = 256
    fusion: Any = "auto"
    deterministic: bool = False
    collective: str = "flat"

    def __post_init__(self) -> None:
        dtype = _DTYPES.get(self.dtype, self.dtype) if isinstance(self.dtype, str) else self.dtype
        if dtype not in (*_DTYPES.values(), *_BITS):
            raise ValueError(
                f"dtype={self.dtype!r} is unknown; use torch.bfloat16 ('bf16'), torch.float16 ('fp16'), torch.int8 "
                "('int8'), 'int4', 'int2' or 'int1'"
            )
        object.__setattr__(self, "dtype", dtype)
        check_fusion(self.fusion)
        check_flag("deterministic", self.deterministic)
        check_count("block", self.block, 8)
        if self.block % 8:
            raise ValueError(f"block={self.block!r} must be a multiple of 8")
        if dtype in _BITS:
            name = f"int{_BITS[dtype]}"
            if self.deterministic:
                raise ValueError(
                    f"deterministic=True is not possible with {name}, whose blocks depend on the bucket; leave it out"
                )
            if self.decoupled or self.collective != "flat":
                raise ValueError(f"{name} has its own two-step exchange: leave out decoupled=True and collective=")
            object.__setattr__(self, "has_residual", True)
            object.__setattr__(self, "cheap_pack", False)
        check_collective(self.collective, deterministic=self.deterministic)
        check_decoupling(self, collective=self.collective)

    def payload(self, shapes: Shapes, phase: int) -> list[int]:
        """Return half an fp32 element per element; below 16 bits, the bits and the scales."""
        sizes = super().payload(shapes, phase)
        bits = _BITS.get(self.dtype)
        return two_step.payload(sizes, bits, self.block) if bits else [-(-size // 2) for size in sizes]

    def sums(self, shape: Sequence[int]) -> bool:
        """Return whether it sends 16 bits."""
        return self.dtype not in _BITS

    def compute_seconds(self, shapes: Shapes, phase: int, topology: Topology, costs: Costs) -> list[float]:
        """Copy into the bucket, divide and cast; then cast back."""
        size, prices = elements(shapes), Prices(costs, topology.world_size, topology)
        if self.dtype in _BITS:
            return two_step.seconds(size, topology.world_size, _BITS[self.dtype], prices)
        cast = 1.5  # the 16-bit side has half the bytes
        before, after = prices.passes(COPY + IN_PLACE + cast, size), prices.passes(cast, size)
        if self.decoupled:
            return prices.decoupled(before, after, size, itemsize=2)
        return prices.summed(
            before, after, size, deterministic=self.deterministic, itemsize=2, collective=self.collective
        )

    def reduce(self, bucket: Bucket, state: State) -> Program:
        """Do one all-reduce of 16-bit elements; below 16 bits what ``two_step.py`` says."""
        if bucket.numel == 0:
            return
        if bits := _BITS.get(self.dtype):
            yield from two_step.two_step(bucket, state, bits, self.block)
            return
        assert isinstance(self.dtype, torch.dtype)
        flat = bucket.flat if bucket.flat.element_size() >= 4 else bucket.flat.float()
        message = bucket.mark_used(flat.div_(state.size).to(self.dtype))
        if self.decoupled:
            bucket.write((yield from decoupled_sum(message, state)))
            return
        bucket.write(
            (yield from sum_over_ranks(message, state, deterministic=self.deterministic, collective=self.collective))
        )
