"""LAGS-SGD: Top-k per layer; each layer is as dense as the network can hide behind backward.

Paper: Shi et al.: Layer-wise adaptive gradient sparsification for distributed deep learning with convergence
guarantees, arXiv 1911.08727. The numbers of entries to keep come from ``core.pricing.ratios.lags`` once times are
measured, equal on all ranks; before that every layer sends one element in ``max_ratio``.

Differences from the paper: a layer's budget is the time until the next gradient is ready, by the planner's clocks; a
layer whose all-reduce is hidden is sent dense, without loss; layers that share a message are selected together; the
numbers are part of the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from thinwire.core.checks import check_choice, check_flag, check_number
from thinwire.core.kernels.pairs import WIRES
from thinwire.core.methods.base import accumulate_flat, all_finite, poison, stage_flat
from thinwire.core.methods.sparse import message_units
from thinwire.core.methods.topk import TopK
from thinwire.core.pricing.costs import Costs
from thinwire.core.program import AllReduce, Bucket, Method, Program, Shapes, State, Topology


@dataclass(frozen=True)
class LAGS(Method):
    """Send as much of each layer as costs no time.

    Args:
        max_ratio: no layer is compressed more than this many times.
        exposed_seconds: how long the last layer's exchange may take after backward.
        fusion: "auto": neighbours whose start-ups would cost more than they hide share a message; "none": none do.
        value_dtype: of the values as sent: "fp32", "bf16" or "fp16".
        error_feedback: keep what was not sent; False is for ablations.
    """

    name: ClassVar[str] = "lags"
    has_residual: ClassVar[bool] = True
    start_steps: ClassVar[int] = 2
    fusion_rule: ClassVar[str] = "lags"
    unfit: ClassVar[Mapping[str, str]] = {"fsdp2": "its own plan"}

    max_ratio: float = 1000
    exposed_seconds: float = 0.0
    fusion: Any = "auto"
    value_dtype: str = "fp32"
    error_feedback: bool = True

    def __post_init__(self) -> None:
        check_number("max_ratio", self.max_ratio, least=1)
        check_number("exposed_seconds", self.exposed_seconds, least=0)
        check_choice("fusion", self.fusion, ("auto", "none"))
        check_choice("value_dtype", self.value_dtype, tuple(WIRES))
        check_flag("error_feedback", self.error_feedback)
        if not self.error_feedback:
            object.__setattr__(self, "has_residual", False)

    def least(self, size: int) -> int:
        """Return the least number of elements that a tensor of ``size`` sends: 0 if it is empty, else at least 1."""
        return -int(-size // self.max_ratio)

    def dense(self, name: str, shape: Sequence[int], embedding: bool) -> bool:
        """Return True for vectors and embeddings, as Top-k does."""
        return self._sparse.dense(name, shape, embedding)

    def payload(self, shapes: Shapes, phase: int) -> list[int]:
        """Return each tensor's message at the highest compression, in units of fp32 elements."""
        return message_units(map(self.least, super().payload(shapes, phase)), self.value_dtype)

    def compute_seconds(self, shapes: Shapes, phase: int, topology: Topology, costs: Costs) -> list[float]:
        """Do as Top-k."""
        return self._sparse.compute_seconds(shapes, phase, topology, costs)

    @property
    def _sparse(self) -> TopK:
        return TopK(1 / self.max_ratio, value_dtype=self.value_dtype, error_feedback=self.error_feedback)

    def reduce(self, bucket: Bucket, state: State) -> Program:
        """Do one all-gather of pairs; one all-reduce if the plan keeps everything."""
        if bucket.kept < bucket.numel or not bucket.numel:
            bucket.kept = bucket.kept or self.least(bucket.numel)
            yield from self._sparse.reduce(bucket, state)
            return
        a = accumulate_flat(bucket, state) if self.error_feedback else bucket.gradient()
        total = yield AllReduce(a / state.size)
        finite = all_finite(total)
        state.verdict(finite)
        if self.error_feedback:
            stage_flat(bucket, state, torch.zeros_like(a))
        bucket.write_gradient(total * poison(finite, 1.0, total.dtype))
