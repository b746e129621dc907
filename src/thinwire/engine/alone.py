"""World size 1: every op at once, nothing is sent."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from thinwire.program.ops import AllGather, NextForward, Op, Program


def result_alone(op: Op) -> Tensor | None:
    """What an op returns in a group of one."""
    if isinstance(op, NextForward):
        return None
    return op.tensor.unsqueeze(0) if isinstance(op, AllGather) else op.tensor


def run_alone(program: Program) -> Any:
    """Run a program to its end. Returns its value."""
    value: Any = None
    while True:
        try:
            value = result_alone(program.send(value))
        except StopIteration as end:
            return end.value
