"""One launch for many tensors: a table on the device says which part of which tensor each program has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from thinwire.core.kernels.fused import Kernel, fused
from thinwire.core.kernels.seeding import upload

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 1024
TURNS = 32  # blocks of a program
ELEMENT_BYTES = 4


@dataclass(frozen=True)
class LaunchTable:
    """Each program's row, int64: its tensor's number; that tensor's first program, and how many there are; the number
    of elements; where its part of each list's tensor begins."""

    rows: Tensor

    @property
    def programs(self) -> int:
        return self.rows.shape[0]

    @property
    def columns(self) -> int:
        return self.rows.shape[1]


def table(*lists: Sequence[Tensor]) -> LaunchTable:
    """Return the table of lists of tensors, whose i-th ones have one size and lie alike in memory.

    Made anew only if one lies elsewhere than before: in steady training the same few return.
    """
    device = lists[0][0].device
    places = tuple(tuple(x.data_ptr() for x in some) for some in lists)
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None  # in whose order it is made
    return table_at(device, stream, tuple(x.numel() for x in lists[0]), places)


@lru_cache(maxsize=16)
def table_at(
    device: torch.device, stream: Any, sizes: tuple[int, ...], places: tuple[tuple[int, ...], ...]
) -> LaunchTable:
    part, elements = BLOCK * TURNS, np.array(sizes, dtype=np.int64)
    counts = -(-elements // part)
    owner = np.repeat(np.arange(len(sizes)), counts)
    first = (np.cumsum(counts) - counts)[owner]
    begin = (np.arange(len(owner)) - first) * part
    rows = [owner, first, counts[owner], np.minimum(elements[owner] - begin, part)]
    rows += [np.array(some, dtype=np.int64)[owner] + begin * ELEMENT_BYTES for some in places]
    return LaunchTable(upload(torch.from_numpy(np.stack(rows, 1)), device))


def alike(*lists: Sequence[Tensor]) -> bool:
    """Return whether the i-th tensors lie alike in memory, without gaps, with four bytes an element."""
    return all(_together(*tensors) for tensors in zip(*lists))


def _together(first: Tensor, *others: Tensor) -> bool:
    if first.element_size() != ELEMENT_BYTES:
        return False
    dtype, size = first.dtype, first.numel()
    if first.is_contiguous():  # shapes and strides take longer to get than all else
        return all(x.dtype == dtype and x.numel() == size and x.is_contiguous() for x in others)
    if not first.is_contiguous(memory_format=torch.channels_last):
        return False
    return all(x.dtype == dtype and x.shape == first.shape and x.stride() == first.stride() for x in others)


def _choose(flag: Tensor, new: Sequence[Tensor], old: Sequence[Tensor]) -> None:
    """Overwrite new tensors by the old ones if the flag, 0-dim, is False, without a host read."""
    for x, y in zip(new, old):
        torch.where(flag, x, y, out=x)


@Kernel
def choose_kernel(rows, flag, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    if tl.load(flag) == 0:
        row = rows + tl.program_id(0) * 6
        size = tl.load(row + 3)
        new, old = tl.load(row + 4).to(tl.pointer_type(tl.int32)), tl.load(row + 5).to(tl.pointer_type(tl.int32))
        for begin in range(0, size, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            tl.store(new + at, tl.load(old + at, at < size), at < size)


@fused(_choose, lambda flag, new, old: alike(new, old))
def choose(flag: Tensor, new: Sequence[Tensor], old: Sequence[Tensor]) -> None:
    """Neither the new nor the old ones are read or written if the flag is True."""
    where = table(new, old)
    if where.programs:
        choose_kernel(where.programs, where.rows, flag.view(torch.uint8), BLOCK=BLOCK)
