"""A bucket's memory, kept from step to step so that no step allocates it again."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from thinwire.core.program import Bucket, PlanBucket, Slot
from thinwire.engine.executors.streams import read_here
from thinwire.engine.parameters import gradient_dtype


class Memory:
    """A bucket's slots and, for a method with ``cheap_pack``, one buffer with a view for each parameter.

    Attributes:
        gradients: the views that become ``.grad``; they have their own version counters.
        used: for which parameters this rank had a gradient in the last step.
        handed_over: whether ``.grad`` of all of them is already a view in ``gradients``.
        made: the bucket, once there was a step.
    """

    def __init__(self, entry: PlanBucket, parameters: list[nn.Parameter], *, cheap_pack: bool, ranks: int = 1) -> None:
        """``ranks``: the buffer has room for padding to a multiple of this number of elements."""
        self.parameters, self.kept = parameters, entry.kept
        self.slots = [Slot(n, p.shape, None, gradient_dtype(p), p.device, p) for n, p in zip(entry.names, parameters)]
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
        """Return the bucket of this step, with the present gradients."""
        for slot, parameter in zip(self.slots, self.parameters):
            grad = parameter.grad if parameter.requires_grad else None  # frozen since: an old gradient does not count
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
        """Make ``.grad`` the bucket's memory from now on, so that autograd can reuse the memory that it allocated.

        If that were kept to the end of backward, it would be given back to the system, and each step would fault it in
        again (5 %).

        Args:
            shown: False: the result is not there yet, and ``.grad`` is None.
        """
        self.handed_over = True
        for slot, parameter, grad in zip(self.slots, self.parameters, self.gradients):
            if slot.value is None:  # unused here: gets its average at the end, if another rank uses it
                self.handed_over = False
            else:
                slot.value = slot.result
                parameter.grad = grad if shown else None


def strides_of(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides that autograd gives a parameter's gradient: the parameter's, if these leave no gaps."""
    return torch.empty_like(parameter, device="meta").stride()


def delivered(parameter: Tensor, result: Tensor, value: Tensor | None, *, copy: bool) -> Tensor:
    """Return an average as a tensor that can be ``.grad``: with autograd's strides and its own version counter.

    Args:
        parameter: the parameter.
        result: the average.
        value: the gradient that autograd left, which may be overwritten.
        copy: whether the memory of ``result`` will be used again.
    """
    if not copy and result.stride() == strides_of(parameter):
        return result.data
    own = torch.empty_like(parameter, dtype=result.dtype) if value is None else value
    return own.detach().copy_(result)


def prime_allocator() -> None:
    """Make glibc keep memory that a step frees.

    glibc learns from the largest block that it has seen freed. Otherwise it returns the activations' memory to the
    system after every step, and faults it in again (10 MB a step on a 10 M model).
    """
    torch.empty(31 << 20, dtype=torch.uint8)
