"""Batches by number, from what users give: a function of the number, or something to iterate over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

Batches = Callable[[int], Any] | Iterable[Any]
"""number -> batch; or an iterable, which starts over at its end."""

Loss = Callable[[nn.Module, Any], Tensor]
"""(model, batch) -> mean loss of the batch, a scalar."""


def numbered(batches: Batches) -> Callable[[int], Any]:
    """A function of the number; of an iterable it gives the next batch, whatever the number.

    Raises:
        ValueError: when it is called, if the iterable is empty.
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
