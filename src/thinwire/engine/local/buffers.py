"""What a round averages besides parameters: buffers, and moments of the inner optimizer.

Floating-point tensors (BatchNorm's statistics) become the mean over the ranks where they are finite. Other tensors
become rank 0's; to integers, what this rank counted during the exchange is added.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from thinwire.core.collectives.sockets import shares_memory
from thinwire.core.methods.base import all_finite
from thinwire.core.program import AllReduce, Broadcast, Program, working_dtype


class Averages:
    """The averages of tensors that are exchanged with a round."""

    def __init__(self) -> None:
        self._received = dict[torch.dtype, Tensor]()
        self._counted = dict[torch.dtype, Tensor]()  # signed integers, as they were sent
        self._by_dtype: dict[torch.dtype, list[Tensor]] = {}

    def send(self, tensors: Iterable[Tensor]) -> Program:
        """Return a round's program. The tensors, in equal order on all ranks, may change while it runs."""
        self._aim(tensors)
        sent = {dtype: _flat(some) for dtype, some in self._by_dtype.items()}
        self._counted = {dtype: sent[dtype].clone() for dtype in self._whole_numbers()}
        return self._exchange(sent)

    def _aim(self, tensors: Iterable[Tensor]) -> None:
        self._by_dtype.clear()
        for x in tensors:
            if x.numel():
                self._by_dtype.setdefault(x.dtype, []).append(x)

    def _whole_numbers(self) -> list[torch.dtype]:
        return [x for x in self._by_dtype if x.is_signed and not x.is_floating_point and not x.is_complex]

    def _exchange(self, sent: dict[torch.dtype, Tensor]) -> Program:
        for dtype, x in sent.items():
            if dtype.is_floating_point:
                sizes = [one.numel() for one in self._by_dtype[dtype]]
                own = x.to(working_dtype(dtype)).split(sizes)
                finite = [all_finite(one) for one in own]
                given = [torch.where(ok, one, torch.zeros_like(one)) for ok, one in zip(finite, own)]
                total = yield AllReduce(torch.cat([*given, torch.stack(finite).to(own[0].dtype)]))
                *sums, ranks = total.split([*sizes, len(sizes)])
                self._received[dtype] = torch.cat([one / count for one, count in zip(sums, ranks)])
            else:
                self._received[dtype] = (yield Broadcast(x.view(torch.uint8))).view(dtype)  # Gloo lacks some dtypes

    @torch.no_grad()
    def merge(self, tensors: Iterable[Tensor] | None = None) -> None:
        """Take over what has arrived; a tensor that was finite on no rank, such as a mask, is left alone.

        Args:
            tensors: what stands in the places of those that were sent; None: they do.
        """
        if self._received and tensors is not None:
            self._aim(tensors)
        for dtype, received in self._received.items():
            some = self._by_dtype[dtype]
            if dtype in self._counted:
                received = received + _flat(some) - self._counted[dtype]
            for x, part in zip(some, received.split([x.numel() for x in some])):
                mean = part.view(x.shape)
                if dtype.is_floating_point:
                    mean = torch.where(all_finite(part), mean, x.to(mean.dtype))
                if shares_memory(x):
                    x.data = mean.to(dtype)
                else:
                    x.copy_(mean)
        self._received.clear()
        self._counted.clear()

    def snapshot(self) -> list[Tensor]:
        """Return clones of what has arrived and is not merged, and of the integers as they were sent."""
        return [x.clone() for x in (*self._received.values(), *self._counted.values())]

    def restore(self, saved: Iterable[Tensor], tensors: Iterable[Tensor]) -> None:
        """Take over a snapshot, for tensors like those that were sent."""
        self._aim(tensors)
        values = iter(saved)
        received, counted = (
            {dtype: x.to(self._by_dtype[dtype][0].device, copy=True) for dtype, x in zip(dtypes, values)}
            for dtypes in (list(self._by_dtype), self._whole_numbers())
        )
        self._received, self._counted = received, counted  # older files lack the second


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in tensors])


class Moments:
    """The state of inner optimizers that is averaged every so many rounds (DES-LOC).

    Args:
        every: rounds between two averages, by the state's name: ``{"exp_avg": 3, "exp_avg_sq": 6}``.
        optimizers: the inner optimizers.
        parameters: in an order that is equal on all ranks.
    """

    def __init__(
        self, every: dict[str, int], optimizers: Iterable[torch.optim.Optimizer], parameters: Iterable[Tensor]
    ) -> None:
        self._every, self._optimizers, self._parameters = every, list(optimizers), list(parameters)

    @property
    def dtypes(self) -> set[torch.dtype]:
        """The dtypes of everything that may be averaged."""
        return {p.dtype for p in self._parameters} if self._every else set()

    def due(self, round_: int) -> list[Tensor]:
        """Return what is averaged in the round of this number, from 1; zeros, to be ignored, for missing state.

        Raises:
            ValueError: no parameter has a state of one of the names.
        """
        states = [[o.state[p] for o in self._optimizers if p in o.state] for p in self._parameters]
        tensors = [{key: x for one in some for key, x in one.items() if isinstance(x, Tensor)} for some in states]
        for name in self._every:
            if not any(name in state for state in tensors):
                known = ", ".join(sorted({key for state in tensors for key in state})) or "none"
                raise ValueError(f"moments: the optimizer has no state {name!r}; it has {known}")
        names = [name for name, every in self._every.items() if round_ % every == 0]
        pairs = list(zip(self._parameters, tensors))
        return [state[name] if name in state else torch.zeros_like(p) for name in names for p, state in pairs]
