"""The collectives that a method will issue for some tensors, early and late in training, from which lanes are made."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.core.program import Method, Topology
from thinwire.core.program.trace import TracedExchange, steady_step, trace, with_rare_rounds


def traced(
    method: Method,
    shapes: Sequence[tuple[str, Sequence[int]]],
    topology: Topology,
    *,
    rank: int,
    dtype: torch.dtype = torch.float32,
) -> list[list[TracedExchange]]:
    """Return the collectives of every phase: first those of a step late in training, then those of the first steps.

    All ranks open lanes from it at the same point, so that no program has to open one later.
    """
    steps = [*(steady_step(method, phase) for phase in range(method.phases)), *range(method.phases)]
    found = [trace(method, shapes, topology, rank=rank, step=step, dtype=dtype) for step in steps]
    return with_rare_rounds(method, found)
