"""The base class of every method: one generator, and what planners need to know about it."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from thinwire.program.bucket import Bucket
from thinwire.program.ops import Program
from thinwire.program.state import State
from thinwire.program.topology import Topology


class Method(abc.ABC):
    """What happens to one bucket of gradients, as straight-line code.

    A method is a frozen dataclass whose fields are its options. It keeps no state: whatever it remembers lives in the
    :class:`State` under the parameter's name.

    Attributes:
        name: the registry name.
        phases: number of fusion plans; step % phases chooses (ACP has two).
        has_residual: whether something is held back for a later step.
        exact: whether the result is the plain average.
        exact_start: exact steps that a training begins with by default, before residuals and bases say anything.
        light: whether what comes before the first exchange costs no more than a copy.
        shards: whether its residual is of a part of the bucket, a slice of each parameter (``State.stage_slice``).
        alone: what a single rank, which runs S-SGD instead, has to do without; a clause for people.
    """

    name: ClassVar[str] = ""
    phases: ClassVar[int] = 1
    has_residual: ClassVar[bool] = False
    exact: ClassVar[bool] = False
    exact_start: ClassVar[int] = 0
    light: ClassVar[bool] = False
    shards: ClassVar[bool] = False
    alone: ClassVar[str] = ""
    fusion: Any = "auto"

    @abc.abstractmethod
    def reduce(self, bucket: Bucket, state: State) -> Program:
        """Exchange one bucket. It may not branch in Python on a tensor's values, only on shapes and ``state.step``."""

    def dense(self, name: str, shape: Sequence[int], module: nn.Module | None) -> bool:
        """Whether ``attach(keep_dense="auto")`` should keep this parameter in plain S-SGD buckets."""
        return False

    def sums(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape arrives as the plain sum of what ranks bring, so that -0.0 stays -0.0."""
        return False

    def beside(self) -> Method | None:
        """The program of the parameters that stay dense; None: S-SGD."""
        return None

    def settle(self, shapes: Sequence[Sequence[int]], kept: int, topology: Topology, costs: Any) -> str:
        """What a measured plan should note as a bucket's ``exchange``; "": nothing is left to the plan."""
        return ""

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027
        """Raise ``ValueError`` if the method cannot serve this optimizer. Not asked on a single rank."""

    def payload(self, shapes: Sequence[Sequence[int]], phase: int) -> list[int]:
        """Elements on the wire for each tensor of these shapes, in fp32 units: what fusion thresholds are scaled by."""
        return [math.prod(shape) for shape in shapes]

    def compute_seconds(
        self, shapes: Sequence[Sequence[int]], phase: int, topology: Topology, costs: Any
    ) -> list[float] | None:
        """Seconds of each segment between yields (yields + 1 numbers) for the simulator; None: price it as free."""
        return None

    def options(self) -> Mapping[str, Any]:
        """The options as plain data: compared over ranks at ``attach``, stored in checkpoints."""
        if not dataclasses.is_dataclass(self):
            return {}
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
