"""The base class of every method: one generator, and what planners need to know about it."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, ClassVar

import torch

from thinwire.core.program.bucket import Bucket
from thinwire.core.program.ops import Program
from thinwire.core.program.state import State
from thinwire.core.program.topology import Topology

Shapes = Sequence[Sequence[int]]
"""Of a bucket's parameters."""


class Method(abc.ABC):
    """A method: what happens to one bucket of gradients, as straight-line code.

    A method is a frozen dataclass whose fields are its options. It keeps no state of its own: state is kept in the
    :class:`State` under the parameter's name.

    What the rest of the library must know about a method is declared here, so that no code depends on a method's name.
    The last five attributes are options of some methods, as fields of their dataclass; other methods keep the defaults.

    Attributes:
        phases: number of fusion plans; step % phases chooses (ACP has two).
        has_residual: whether something is held back for a later step.
        exact: whether the result is the plain average.
        start_steps: default number of steps before the method begins, because its residuals and bases say nothing yet
            (see ``core/methods/start.py``).
        cheap_pack: whether what comes before the first exchange costs no more than a copy.
        shards: whether its residual is of a part of the bucket: a slice of each parameter (``State.stage_slice``).
        single_rank_note: what a single rank, which runs S-SGD instead, does without; a clause for people.
        loss: in a word, how the average differs if nothing is held back: "noisy", "rounded to 16 bits", ...
        selects: whether its compute before the exchange is a selection, which a measured plan weighs against messages.
        fusion_rule: rule by which measured plans make its buckets, whatever ``fusion`` says; "": as ``fusion`` says.
        bucket_unit: what ``fusion="auto"`` counts without measurements: "gradient" (MiB of gradients) or "payload".
        candidates: options under which ``thinwire plan`` prices it if no method is named.
        auto: its place among what ``attach("auto", lossy=True)`` prices, and under which options; None: none.
        unfit: where it cannot be used, and why: "fsdp2", what it needs; "federated" and "local", a clause.
        deterministic: whether sums are made in rank order.
        collective: how sums go over nodes and ranks.
        decoupled: whether a part of the exchange is left to the next forward.
        verify_every: steps between rounds in which all ranks compare what must be equal; 0: no such rounds.
    """

    name: ClassVar[str] = ""
    phases: ClassVar[int] = 1
    has_residual: ClassVar[bool] = False
    exact: ClassVar[bool] = False
    start_steps: ClassVar[int] = 0
    cheap_pack: ClassVar[bool] = False
    shards: ClassVar[bool] = False
    single_rank_note: ClassVar[str] = ""
    loss: ClassVar[str] = "lossy"
    selects: ClassVar[bool] = False
    fusion_rule: ClassVar[str] = ""
    bucket_unit: ClassVar[str] = "gradient"
    candidates: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)
    auto: ClassVar[tuple[int, tuple[Mapping[str, Any], ...]] | None] = None
    unfit: ClassVar[Mapping[str, str]] = {}
    fusion: Any = "auto"
    deterministic: bool = False
    collective: str = "flat"
    decoupled: bool = False
    verify_every: int = 0

    @abc.abstractmethod
    def reduce(self, bucket: Bucket, state: State) -> Program:
        """Exchange one bucket. May branch in Python only on shapes and ``state.step``, never on a tensor's values."""

    @property
    def result(self) -> str:
        """What the average is, in a word: "exact", "late" (what is not sent follows later), or its ``loss``."""
        return "exact" if self.exact else "late" if self.has_residual else self.loss

    def dense(self, name: str, shape: Sequence[int], embedding: bool) -> bool:
        """Return whether ``keep_dense="auto"`` keeps a parameter uncompressed; ``embedding``: it is an embedding's."""
        return False

    def sums(self, shape: Sequence[int]) -> bool:
        """Return whether a tensor of this shape arrives as the plain sum over ranks, so that -0.0 stays -0.0."""
        return False

    def dense_method(self) -> Method | None:
        """Return the method for parameters that stay dense; None: S-SGD."""
        return None

    def plan_exchange(self, shapes: Shapes, kept: int, topology: Topology, costs: Any) -> str:
        """Return what a measured plan should note as a bucket's ``exchange``; "": nothing."""
        return ""

    def on_mixed_processors(self) -> Method:
        """Return the method as it must run where ranks round differently; itself if it does not need equal bits."""
        return self

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027
        """Raise ``ValueError`` if the method does not work with this optimizer. Not called on a single rank."""

    def payload(self, shapes: Shapes, phase: int) -> list[int]:
        """Return the elements sent for each of these shapes, in fp32 units; they scale the fusion thresholds."""
        return [math.prod(shape) for shape in shapes]

    def compute_seconds(self, shapes: Shapes, phase: int, topology: Topology, costs: Any) -> list[float] | None:
        """Return seconds of each segment between yields (yields + 1 numbers) for the simulator; None: free."""
        return None

    def options(self) -> Mapping[str, Any]:
        """Return the options as plain data: compared over ranks at ``attach``, stored in checkpoints."""
        if not dataclasses.is_dataclass(self):
            return {}
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        counts = {n: int(v) for n, v in found.items() if type(v) is not bool and isinstance(v, Integral)}  # NumPy's too
        return {**found, **counts}
