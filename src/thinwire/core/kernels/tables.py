"""One launch for many tensors: a table on the device says which part of which tensor each program has."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from thinwire.core.kernels.fused import Kernel, fused
from thinwire.core.kernels.seeding import upload

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 1024
TURNS = 16  # blocks of a program


def table(*lists: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """Return the table of lists of tensors, whose i-th ones are of one size and lie alike in memory.

    Each program's row, int64: its tensor's number; the number of elements; where its part of each begins, in bytes.
    The second result is the first program of each tensor, and their number.
    """
    part = BLOCK * TURNS
    sizes = np.array([x.numel() for x in lists[0]])
    counts = -(-sizes // part)
    owner = np.repeat(np.arange(len(sizes)), counts)
    firsts = [*accumulate(counts.tolist(), initial=0)]
    begin = (np.arange(firsts[-1]) - np.array(firsts)[owner]) * part
    rows = [owner, np.minimum(sizes[owner] - begin, part)]
    for some in lists:
        rows.append(np.array([x.data_ptr() for x in some])[owner] + begin * some[0].element_size())
    return upload(torch.from_numpy(np.stack(rows, 1)), lists[0][0].device), firsts


def alike(*lists: Sequence[Tensor]) -> bool:
    """Return whether the i-th tensors lie alike in memory, without gaps, and all are of four bytes an element."""
    return all(
        first.element_size() == 4
        and (first.is_contiguous() or first.is_contiguous(memory_format=torch.channels_last))
        and all(x.dtype == first.dtype and x.shape == first.shape and x.stride() == first.stride() for x in others)
        for first, *others in zip(*lists)
    )


def _choose(flag: Tensor, new: Sequence[Tensor], old: Sequence[Tensor]) -> None:
    """Overwrite new tensors by the old ones if the flag, 0-dim, is False, without a host read."""
    for x, y in zip(new, old):
        torch.where(flag, x, y, out=x)


@Kernel
def choose_kernel(rows, flag, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    if tl.load(flag) == 0:
        row = rows + tl.program_id(0) * 4
        size = tl.load(row + 1)
        new, old = tl.load(row + 2).to(tl.pointer_type(tl.int32)), tl.load(row + 3).to(tl.pointer_type(tl.int32))
        for begin in range(0, size, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            tl.store(new + at, tl.load(old + at, at < size), at < size)


@fused(_choose)
def choose(flag: Tensor, new: Sequence[Tensor], old: Sequence[Tensor]) -> None:
    """Neither the new nor the old ones are read or written if the flag is True."""
    if not alike(new, old):
        _choose(flag, new, old)
        return
    rows, firsts = table(new, old)
    if firsts[-1]:
        choose_kernel(firsts[-1], rows, flag.view(torch.uint8), BLOCK=BLOCK)
