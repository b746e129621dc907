"""Custom rows: a user's ``module:function`` that makes a workload train on the ranks of a group in its own way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from thinwire.core.checks import check_count
from thinwire.tools.bench.models.workload import Workload
from thinwire.tools.bench.rows import Row
from thinwire.tools.bench.words import load_function


class OptimizerLike(Protocol):
    """The part of an optimizer that a training loop needs."""

    def zero_grad(self, set_to_none: bool = True) -> None: ...

    def step(self) -> Any: ...


@dataclass(frozen=True)
class Trainer:
    """The return value of a row's function.

    Attributes:
        module: called in the forward pass: the workload's model or a wrapper around it.
        optimizer: its ``zero_grad`` and ``step`` are called once per step; whatever else the row does (averaging of
            parameters, a vote) happens in them.
        close: stops what the row started (threads, servers).
        period: steps after which its traffic repeats, such as those between two averages of the parameters; the time of
            a step is then the mean over that many.
    """

    module: nn.Module
    optimizer: OptimizerLike
    close: Callable[[], None] = lambda: None
    period: int = 1

    def __post_init__(self) -> None:
        check_count("period", self.period)


def build_trainer(row: Row, workload: Workload, group: Any) -> Trainer:
    """Call the row's function: ``function(workload, group, **options)``, on all ranks of ``group``."""
    trainer = load_function(row.kind, "row")(workload, group, **row.options)
    if not isinstance(trainer, Trainer):
        raise ValueError(
            f"row {row.kind!r} must return a thinwire.tools.bench.trainer.Trainer, not {type(trainer).__name__}"
        )
    return trainer
