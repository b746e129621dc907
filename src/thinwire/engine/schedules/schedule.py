"""The interface of schedules: what happens between the end of one backward and the next."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence

from torch import Tensor, nn


class Schedule(abc.ABC):
    """The schedule of one attached model.

    Attributes:
        accumulated: whether there are gradients of ``no_sync`` passes that have not been reduced.
        watched: averages that no optimizer has used yet, by index; no gradient may be added to them.
    """

    accumulated = False
    watched: Mapping[int, object] = {}

    @property
    def readers(self) -> Sequence[nn.Module]:
        """The modules whose forwards must begin with ``before_forward``."""
        return ()

    def before_forward(self, module: nn.Module) -> None:
        """Bring what a module reads up to date, at the start of its forward."""
        raise NotImplementedError

    @abc.abstractmethod
    def begin(self) -> None:
        """Prepare for a backward whose gradients are exchanged."""

    @abc.abstractmethod
    def deliver(self) -> None:
        """Put averages where the optimizer finds them, and commit the step, when all programs have ended or pause."""

    @abc.abstractmethod
    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Clip what was delivered by its global norm. Return the norm."""

    def check(self, index: int, grad: Tensor | None) -> None:  # noqa: B027
        """Raise ``RuntimeError`` if a gradient was added to an average that no optimizer has used."""

    def accumulate(self, index: int, grad: Tensor | None) -> None:
        """Note a gradient that came in a ``no_sync`` pass."""
        self.accumulated = True

    def used(self, indices: Sequence[int]) -> None:  # noqa: B027
        """Stop watching averages that an optimizer is about to use; the script may add to them afterwards."""

    def untouched(self) -> set[str]:
        """Return names of parameters whose ``.grad`` still holds the last average."""
        return set()

    @property
    def pending(self) -> list[int]:
        """Indices of the parameters that wait for their update."""
        return []

    def complete(self) -> None:  # noqa: B027
        """Make all pending updates. Local."""

    def order(self) -> list[int] | None:
        """Return the order of parameters from which to make buckets, if it is not the order of arrival."""
        return None

    def close(self, *, broken: bool) -> None:  # noqa: B027
        """Make all pending updates and remove the hooks."""
