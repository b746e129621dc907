"""What runs in a method's stead in its first steps, when residuals and bases say little yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thinwire.methods.decoupling import schedule
from thinwire.methods.ssgd import SSGD
from thinwire.methods.two_step import two_step
from thinwire.program import Bucket, Method, Program, State, Topology

_BLOCK = 256


@dataclass(frozen=True)
class EightBits(Method):
    """The average in 8 bits, without a residual: at most 1/254 of a block's largest is rounded off and lost, twice."""

    name: ClassVar[str] = "8-bit start"
    loss: ClassVar[str] = "rounded to 8 bits"

    def reduce(self, bucket: Bucket, state: State) -> Program:
        """An all-to-all and an all-gather of codes."""
        if bucket.numel:
            yield from two_step(bucket, state, 8, _BLOCK, feedback=False)


def exact_method(method: Method) -> Method:
    """Of what a method leaves dense, and of steps that have to be exact."""
    return method.dense_method() or SSGD(
        deterministic=method.deterministic, collective=method.collective, **schedule(method)
    )


def start_method(method: Method, topology: Topology, asked: int | None) -> Method:
    """Of the steps before a method begins.

    8 bits where it begins late by itself and has residuals to make up for what it rounds itself; else exact.

    Args:
        method: that will run.
        topology: of the ranks; between machines of several ranks sums go by way of the first of each.
        asked: the number of exact steps that the user wants; None: as the method has it.
    """
    plain = method.dense_method() is None and not schedule(method) and not method.deterministic
    if asked is None and plain and method.has_residual and not topology.two_levels:
        return EightBits()
    return exact_method(method)


def measuring_method(topology: Topology, asked: int | None) -> Method:
    """Of the steps in which "auto" measures before it takes a lossy method, or an exact one. Arguments as above."""
    return SSGD() if asked or topology.two_levels else EightBits()
