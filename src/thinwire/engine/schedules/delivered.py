"""Averages that have become ``.grad``, watched until ``step()`` has used them: nothing may be added to them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


class DeliveredGrads:
    """Of one model."""

    def __init__(self) -> None:
        self._noted: dict[int, tuple[Tensor, int]] = {}

    def renew(self) -> None:
        """Another step's averages are about to be delivered."""
        self._noted.clear()

    def note(self, index: int, grad: Tensor) -> None:
        """A parameter's average, as it is now."""
        self._noted[index] = grad, grad._version

    def forget(self, indices: Iterable[int]) -> None:
        """An optimizer is about to use these: what is added from then on is the script's affair."""
        for index in indices:
            self._noted.pop(index, None)

    def holds(self, index: int, grad: Tensor | None) -> bool:
        """Whether a ``.grad`` is still the tensor in which the average came."""
        return grad is not None and index in self._noted and self._noted[index][0] is grad

    def added_to(self, index: int, grad: Tensor | None) -> bool:
        """Whether autograd just added to an average that nobody has touched since."""
        delivered, version = self._noted.get(index, (None, 0))
        return delivered is not None and grad is delivered and delivered._version == version + 1
