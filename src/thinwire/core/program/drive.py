"""Run one program in the calling thread, given a function that answers each of its ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from thinwire.core.program.modes import own_modes
from thinwire.core.program.ops import NextForward, Op, Program, Scope


@dataclass(frozen=True, eq=False)
class Paused:
    """A program at its ``NextForward``: ``shard`` is what it received last, ``rounds`` how many ops it has issued."""

    program: Program
    shard: Any
    pause: NextForward
    rounds: dict[Scope, int] = field(default_factory=dict)


def drive(program: Program, answer: Callable[[Op], Any], *, pause: bool = False) -> Any:
    """Run a program to its end, or with ``pause`` to its ``NextForward``.

    Args:
        program: has not begun, or is paused.
        answer: returns an op's result.
        pause: stop at ``NextForward``.

    Returns:
        The program's value; :class:`Paused` if it was stopped.
    """
    value: Any = None
    with own_modes():
        while True:
            try:
                op = program.send(value)
            except StopIteration as end:
                return end.value
            if pause and isinstance(op, NextForward):
                return Paused(program, value, op)
            value = answer(op)
