"""Batches by number, from what users pass: a function of the number, or an iterable."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

Batches = Callable[[int], Any] | Iterable[Any]
"""number -> batch; or an iterable, which restarts at its end."""

Loss = Callable[[nn.Module, Any], Tensor]
"""(model, batch) -> mean loss of the batch, a scalar."""


def numbered(batches: Batches) -> Callable[[int], Any]:
    """Return a function of the number; for an iterable, it returns the next batch, whatever the number.

    Raises:
        ValueError: the iterable is empty; raised when the function is called.
    """
    if callable(batches):
        return batches
    iterator: Iterator[Any] = iter(())

    def take(number: int) -> Any:
        nonlocal iterator
        for _ in range(2):
            for batch in iterator:
                return batch
            iterator = iter(batches)
        raise ValueError("batches is empty: it must give at least one batch")

    return take
