"""Buffers at a round: the mean of floating-point ones (BatchNorm's statistics), rank 0's of the others."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from thinwire.methods.base import all_finite
from thinwire.program import AllReduce, Broadcast, Program, working_dtype


class BufferAverages:
    """Of one model.

    Args:
        buffers: in an order that is equal on all ranks.
        ranks: how many.
    """

    def __init__(self, buffers: Iterable[Tensor], ranks: int) -> None:
        self._ranks, self._received = ranks, dict[torch.dtype, Tensor]()
        self._by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for x in buffers:
            if x.numel():
                self._by_dtype.setdefault(x.dtype, []).append(x)

    @property
    def exchanges(self) -> int:
        """Of a round's program."""
        return len(self._by_dtype)

    def __bool__(self) -> bool:
        return bool(self._by_dtype)

    def send(self) -> Program:
        """A round's program; buffers may change while it runs."""
        return self._exchange(
            {dtype: torch.cat([x.reshape(-1) for x in some]) for dtype, some in self._by_dtype.items()}
        )

    def _exchange(self, sent: dict[torch.dtype, Tensor]) -> Program:
        for dtype, x in sent.items():
            if dtype.is_floating_point:
                total = yield AllReduce(x.to(working_dtype(dtype)))
                self._received[dtype] = total / self._ranks
            else:
                wire = x.view(torch.uint8) if dtype is torch.bool else x
                self._received[dtype] = (yield Broadcast(wire)).view(dtype)

    @torch.no_grad()
    def merge(self) -> None:
        """Take over what has come, unless it is not finite."""
        for dtype, received in self._received.items():
            if not dtype.is_floating_point or bool(all_finite(received)):
                some = self._by_dtype[dtype]
                for x, part in zip(some, received.split([x.numel() for x in some])):
                    x.copy_(part.view(x.shape))
        self._received.clear()

    def snapshot(self) -> list[Tensor]:
        """What has come and is not merged, cloned."""
        return [x.clone() for x in self._received.values()]

    def restore(self, saved: Iterable[Tensor]) -> None:
        """Take over a snapshot of the same model."""
        self._received = {
            dtype: x.to(some[0].device, copy=True) for (dtype, some), x in zip(self._by_dtype.items(), saved)
        }
