"""Runs one program in the calling thread: whoever has an answer to each of its ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from thinwire.program.ops import NextForward, Op, Program, Scope


@dataclass(frozen=True, eq=False)
class Paused:
    """A program at its ``NextForward``: ``shard`` is the last thing it received, ``rounds`` what it has issued."""

    program: Program
    shard: Any
    pause: NextForward
    rounds: dict[Scope, int] = field(default_factory=dict)


def drive(program: Program, answer: Callable[[Op], Any], *, pause: bool = False) -> Any:
    """Run a program to its end, or with ``pause`` to its ``NextForward``.

    Args:
        program: that has not begun, or is paused.
        answer: what an op gives.
        pause: stop there.

    Returns:
        The program's value; of one that was stopped, :class:`Paused`.
    """
    value: Any = None
    while True:
        try:
            op = program.send(value)
        except StopIteration as end:
            return end.value
        if pause and isinstance(op, NextForward):
            return Paused(program, value, op)
        value = answer(op)
