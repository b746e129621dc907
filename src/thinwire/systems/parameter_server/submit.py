"""What a worker hands in: one gradient, or the difference made by several local steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from thinwire.core.checks import check_count

INNER = ("adamw", "sgd")


@dataclass(frozen=True)
class Gradient:
    """The gradient of one batch at the weights that the worker received."""

    @property
    def steps(self) -> int:
        """Batches per submission."""
        return 1


@dataclass(frozen=True)
class LocalSteps:
    """H steps of a local optimizer; the worker hands in theta before minus theta after (a pseudo-gradient).

    Attributes:
        steps: H, batches per submission.
        inner: "adamw" or "sgd"; its state stays in the worker.
        lr: of the inner optimizer.
        balance: slower workers make fewer steps, so that all take equally long (DyLU of asynchronous local SGD,
            arXiv 2401.09135): steps * speed / speed of the fastest, rounded down, at least 1.
    """

    steps: int = 20
    inner: str = "adamw"
    lr: float = 4e-4
    balance: bool = False

    def __post_init__(self) -> None:
        check_count("steps", self.steps, 1)
        if self.inner not in INNER:
            raise ValueError(f"inner={self.inner!r} is unknown; use one of {', '.join(map(repr, INNER))}")
        if not isinstance(self.lr, (int, float)) or not 0 < self.lr < math.inf:
            raise ValueError(f"lr={self.lr!r} must be a number above 0")


Submission = Gradient | LocalSteps
