"""What a schedule does between the end of one backward and the next."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence

from torch import Tensor, nn


class Schedule(abc.ABC):
    """Of one attached model.

    Attributes:
        accumulated: gradients of ``no_sync`` passes that have not been reduced.
        watched: by index, averages that nobody has used yet; a gradient may not be added to them.
    """

    accumulated = False
    watched: Mapping[int, object] = {}

    @property
    def readers(self) -> Sequence[nn.Module]:
        """The modules whose forwards are to begin with ``before_forward``."""
        return ()

    def before_forward(self, module: nn.Module) -> None:
        """A module's forward begins: what it reads must be up to date."""
        raise NotImplementedError

    @abc.abstractmethod
    def begin(self) -> None:
        """A backward begins whose gradients are exchanged."""

    @abc.abstractmethod
    def deliver(self) -> None:
        """The programs have ended, or pause: put averages where the optimizer finds them, and commit the step."""

    @abc.abstractmethod
    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Clip what was delivered by its global norm. Returns the norm."""

    def check(self, index: int, grad: Tensor | None) -> None:  # noqa: B027
        """Raise ``RuntimeError`` if a gradient was added to an average that nobody has used."""

    def accumulate(self, index: int, grad: Tensor | None) -> None:
        """A gradient came in a ``no_sync`` pass."""
        self.accumulated = True

    def used(self, indices: Sequence[int]) -> None:  # noqa: B027
        """An optimizer is about to use these averages: what is added from then on is the script's affair."""

    def untouched(self) -> set[str]:
        """Names of the parameters whose ``.grad`` is still the tensor in which the last average came."""
        return set()

    @property
    def pending(self) -> list[int]:
        """Indices of the parameters that wait for their update."""
        return []

    def complete(self) -> None:  # noqa: B027
        """Update whatever is pending. Local."""

    def order(self) -> list[int] | None:
        """Parameters in the order in which buckets should be made, where that is not the order of arrival."""
        return None

    def close(self, *, broken: bool) -> None:  # noqa: B027
        """Complete what is pending and take the hooks out."""
