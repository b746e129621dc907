"""What a bucket keeps from step to step, so that no step allocates it anew."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from thinwire.engine.executors.streams import read_here
from thinwire.program import Bucket, PlanBucket, Slot


class Memory:
    """A bucket's slots, and for a method with ``cheap_pack`` one buffer, cut up.

    Attributes:
        gradients: the cuts that become ``.grad``: with version counters of their own.
        used: which of the parameters this rank had a gradient of, in the last step.
        handed_over: whether all of them have ``gradients`` for their ``.grad`` already.
        made: the bucket, once there was a step.
    """

    def __init__(self, entry: PlanBucket, parameters: list[nn.Parameter], *, cheap_pack: bool, ranks: int = 1) -> None:
        """``ranks``: the buffer has room for zeros up to a multiple of so many elements."""
        self.parameters, self.kept = parameters, entry.kept
        self.slots = [Slot(n, p.shape, None, p.dtype, p.device, p) for n, p in zip(entry.names, parameters)]
        self.buffer: Tensor | None = None
        self.views: list[Tensor] | None = None
        self.gradients: list[Tensor] = []
        self.used = [False] * len(parameters)
        self.handed_over = False
        self.made: Bucket | None = None
        if cheap_pack:
            first, sizes = self.slots[0], [s.numel for s in self.slots]
            room = -(-sum(sizes) // ranks) * ranks
            self.buffer = torch.empty(room, dtype=first.dtype, device=first.device)
            pieces = self.buffer[: sum(sizes)].split(sizes)
            self.views = [piece.as_strided(p.shape, strides_of(p)) for p, piece in zip(parameters, pieces)]
            self.gradients = [view.data for view in self.views]

    def bucket(self, index: int, scale: Tensor | None) -> Bucket:
        """A step's bucket of the gradients that are there now."""
        for slot, parameter in zip(self.slots, self.parameters):
            grad = parameter.grad if parameter.requires_grad else None  # frozen since: what is left there is not ours
            slot.value = grad.detach() if grad is not None and grad.requires_grad else grad
            slot.result = None
            if grad is not None and grad.is_cuda:  # the program runs on a side stream
                read_here(grad)
        self.used = [slot.value is not None for slot in self.slots]
        self.handed_over = False
        if self.made is None:
            self.made = Bucket(index, self.slots, buffer=self.buffer, kept=self.kept, views=self.views)
        self.made.renew(scale)
        return self.made

    @property
    def filled(self) -> bool:
        """Whether the gradients have been copied into the buffer."""
        return self.made is not None and self.made.filled

    def hand_over(self, *, shown: bool) -> None:
        """Let ``.grad`` be the bucket's memory from now on: what autograd allocated serves the gradients to come.

        Kept to the end of backward, it would be given back to the system and faulted in again at every step (5 %).

        Args:
            shown: False: there is nothing to show for it yet, and ``.grad`` is None.
        """
        self.handed_over = True
        for slot, parameter, grad in zip(self.slots, self.parameters, self.gradients):
            if slot.value is None:  # unused here: gets its average at the end, if it is used elsewhere
                self.handed_over = False
            else:
                slot.value = slot.result
                parameter.grad = grad if shown else None


def strides_of(parameter: Tensor) -> tuple[int, ...]:
    """The strides that autograd gives a parameter's gradient: its own where they leave no gaps."""
    return torch.empty_like(parameter, device="meta").stride()


def delivered(parameter: Tensor, result: Tensor, value: Tensor | None, *, copy: bool) -> Tensor:
    """An average as a tensor that can be ``.grad``: in the parameter's strides, with a version counter of its own.

    Args:
        parameter: whose.
        result: the average.
        value: the gradient that autograd left, which may be overwritten.
        copy: the memory of ``result`` will be used again.
    """
    if not copy and result.stride() == strides_of(parameter):
        return result.data
    own = torch.empty_like(parameter, dtype=result.dtype) if value is None else value
    return own.detach().copy_(result)


def prime_allocator() -> None:
    """Let glibc keep what a step frees: it learns from the largest block it has seen freed, and otherwise gives the
    activations' memory back to the system after every step, to fault it in again (10 MB a step on a 10 M model).
    """
    torch.empty(31 << 20, dtype=torch.uint8)
