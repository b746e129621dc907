"""In Triton, for CUDA: the histogram of a radix selection in one pass over memory, where torch's scatter needs several.

Twin: ``kernels.select.histogram.digits``; equal bit for bit. No host read, no atomic that decides an order.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_ELEMENTS = 2048
BLOCK_TURNS = 8  # blocks that one program of the histogram counts before it adds to memory


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def digits_kernel(  # type: ignore[no-untyped-def]
    keys, prefix, counts, size, SHIFT: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, TURNS: tl.constexpr
):
    BINS: tl.constexpr = 1 << BITS
    wanted = tl.load(prefix).to(tl.int32)
    first = tl.program_id(0).to(tl.int64) * (BLOCK * TURNS)
    bins = tl.arange(0, 2 * BINS)
    found = tl.zeros((2 * BINS,), tl.int32)
    for turn in range(TURNS):
        at = first + turn * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        key = tl.load(keys + at, inside, 0)
        match = inside & (((key >> (SHIFT - 1)) >> 1) == wanted)  # in two steps: a shift by 32 would exceed the word
        digit = tl.where(match, (key >> (SHIFT - BITS)) & (BINS - 1), BINS)  # one more bin for all others
        found += tl.histogram(digit, 2 * BINS)
    tl.atomic_add(counts + bins, found.to(tl.int64), (bins < BINS) & (found > 0))


def digits(keys: Tensor, prefix: Tensor, shift: int, bits: int) -> Tensor:
    counts = torch.zeros(1 << bits, dtype=torch.int64, device=keys.device)
    grid = (triton.cdiv(keys.numel(), BLOCK_ELEMENTS * BLOCK_TURNS),)
    with torch.cuda.device(keys.device) if keys.is_cuda else nullcontext():  # Triton launches on the current device
        digits_kernel[grid](
            keys, prefix, counts, keys.numel(), SHIFT=shift, BITS=bits, BLOCK=BLOCK_ELEMENTS, TURNS=BLOCK_TURNS
        )
    return counts
