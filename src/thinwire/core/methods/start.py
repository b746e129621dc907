"""What runs in a method's place in its first steps, when residuals and bases carry little information."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thinwire.core.methods.decoupling import schedule
from thinwire.core.methods.ssgd import SSGD
from thinwire.core.methods.two_step import two_step
from thinwire.core.program import Bucket, Method, Program, State, Topology

_BLOCK = 256


@dataclass(frozen=True)
class EightBits(Method):
    """The average in 8 bits without a residual: loses, twice, at most 1/254 of a block's largest magnitude."""

    name: ClassVar[str] = "8-bit start"
    loss: ClassVar[str] = "rounded to 8 bits"

    def reduce(self, bucket: Bucket, state: State) -> Program:
        if bucket.numel:
            yield from two_step(bucket, state, 8, _BLOCK, feedback=False)


def exact_method(method: Method) -> Method:
    """Return the exact method for parameters that a method leaves dense, and for steps that must be exact."""
    return method.dense_method() or SSGD(
        deterministic=method.deterministic, collective=method.collective, **schedule(method)
    )


def start_method(method: Method, topology: Topology, asked: int | None) -> Method:
    """Return the method for the ``asked`` steps (None: its default) before a method begins.

    It uses 8 bits if the method begins late by default and has residuals to make up for the rounding; else it is exact.
    Between machines of several ranks, sums go through each machine's first rank.
    """
    plain = method.dense_method() is None and not schedule(method) and not method.deterministic
    if asked is None and plain and method.has_residual and not topology.two_levels:
        return EightBits()
    return exact_method(method)


def measuring_method(topology: Topology, asked: int | None) -> Method:
    """Return the method for the steps in which "auto" measures, with ``lossy=True``. Arguments: see above."""
    return SSGD() if asked or topology.two_levels else EightBits()
