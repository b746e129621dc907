"""Selection on a GPU: the magnitudes of given ranks, and the band rule, by Triton kernels that read the vector once.

A *key* is the bit pattern of |x|, read as an integer: it is monotone in |x|, and NaN is the largest.

1. ``sample_kernel`` takes a bound from a strided sample, which some more entries reach than the largest rank wanted.
2. ``gather_kernel`` reads all. Each program lists the entries of its tile that reach the bound.
3. ``digits_kernel``, four times, counts the next eight bits of the listed keys: the keys of the ranks, exactly.
4. ``count_kernel`` and ``write_kernel`` choose by the band rule, in index order.

Before the last, MSTopK and Gaussian-k walk to their band. Every count that they ask for is known from a key: more than
k entries reach t if and only if t is at most the key of rank k + 1.

If too few entries reach the bound, or the band begins below it, programs read their whole tile instead of its list. So
no choice depends on the sample. Nothing is read by the host, and all atomics are of whole numbers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.core.kernels.fused import Kernel

if TYPE_CHECKING:
    import triton.language as tl

LARGEST, INFINITE, NAN, BEYOND = 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7F800002  # keys; no entry reaches the last

# The state, int64: how many entries are listed, the bound, the least and the largest key, the band. Then, for each of
# four digits and each rank, the digits before it and the rank among the keys that begin with them; then 256 counts.
FOUND, BOUND, LEAST, TOP, LOW, HIGH, DIGITS = 0, 1, 2, 3, 4, 5, 6

TILES = 2048  # programs, at most
BLOCK = 1024  # elements that a program reads at once
SAMPLES = 4096
SMALL = 1 << 15  # fewer elements are not worth a list


@Kernel
def key_of(bits):  # type: ignore[no-untyped-def]
    return tl.minimum(bits & 0x7FFFFFFF, NAN)


@Kernel
def size_of(key):  # type: ignore[no-untyped-def]
    """The magnitude in fp64; what is not finite counts as the largest number."""
    return tl.minimum(key, LARGEST).to(tl.int32).to(tl.float32, bitcast=True).to(tl.float64)


@Kernel
def rounded_key(t):  # type: ignore[no-untyped-def]
    """The key of a threshold in fp64, as fp32; at most the largest number's."""
    return tl.minimum(t, 3.4028234663852886e38).to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64)


@Kernel
def sample_kernel(  # type: ignore[no-untyped-def]
    bits,
    state,
    size: int,
    stride: int,
    place: int,
    rank0: int,
    rank1: int,
    rank2: int,
    CELLS: tl.constexpr,
    SAMPLED: tl.constexpr,
):
    """The bound is the ``place``-th largest of the sample, rounded down to 16 bits."""
    at = tl.arange(0, SAMPLED).to(tl.int64) * stride
    key = key_of(tl.load(bits + at, at < size, 0))
    bound = 0
    for turn in range(16):
        higher = bound + (0x40000000 >> turn)
        bound = tl.where(tl.sum((key >= higher).to(tl.int32)) >= place, higher, bound)
    cell = tl.arange(0, 4096)
    value = tl.where(cell == DIGITS + 1, rank0, 0)
    value = tl.where(cell == DIGITS + 3, rank1, value)
    value = tl.where(cell == DIGITS + 5, rank2, value)
    value = tl.where(cell == LEAST, NAN, value)
    value = tl.where(cell == BOUND, tl.where(bound == 0, BEYOND, bound), value)  # 0: a list of all is not worth it
    tl.store(state + cell, value.to(tl.int64), cell < CELLS)


@Kernel
def gather_kernel(  # type: ignore[no-untyped-def]
    bits, state, lists, found, sums, size: int, span, MOMENT: tl.constexpr, WIDTH: tl.constexpr
):
    """Also the largest key; with a moment, 1 or 2, the least, and the tile's sum of magnitudes to that power."""
    first = tl.program_id(0).to(tl.int64) * span
    length = tl.minimum(size - first, span).to(tl.int32)
    bound = tl.load(state + BOUND).to(tl.int32)
    listed = tl.program_id(0) * 0
    top, least = tl.zeros((WIDTH,), tl.int32), tl.full((WIDTH,), NAN, tl.int32)
    total = tl.zeros((WIDTH,), tl.float64)
    for begin in range(0, length, WIDTH):
        j = begin + tl.arange(0, WIDTH)
        inside = j < length
        key = key_of(tl.load(bits + first + j, inside, 0))
        hit = (inside & (key >= bound)).to(tl.int32)
        tl.store(lists + first + (listed + tl.cumsum(hit, 0) - hit), j, hit > 0)
        listed += tl.sum(hit)
        top = tl.maximum(top, key)
        if MOMENT > 0:
            a = size_of(key)
            total += a if MOMENT == 1 else a * a
            least = tl.minimum(least, tl.where(inside, key, NAN))
    tl.store(found + tl.program_id(0), listed)
    tl.atomic_add(state + FOUND, listed.to(tl.int64))
    tl.atomic_max(state + TOP, tl.max(top).to(tl.int64))
    if MOMENT > 0:
        tl.atomic_min(state + LEAST, tl.min(least).to(tl.int64))
        tl.store(sums + tl.program_id(0), tl.sum(total))


@Kernel
def rank_key(state, rank, DIGIT: tl.constexpr, RANKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first digits of the key of a rank, and which of the keys that begin with them it is, from the largest."""
    if DIGIT == 0:
        key, left = tl.load(state + DIGITS + 2 * rank), tl.load(state + DIGITS + 2 * rank + 1)
    else:
        cell = (DIGIT - 1) * RANKS + rank
        bins = tl.arange(0, 256)
        counts = tl.load(state + DIGITS + 8 * RANKS + 256 * cell + bins)
        left = tl.load(state + DIGITS + 2 * cell + 1)
        digit = tl.sum(((tl.cumsum(counts, 0, reverse=True) >= left) & (bins > 0)).to(tl.int64))
        key = tl.load(state + DIGITS + 2 * cell) * 256 + digit
        left -= tl.sum(tl.where(bins > digit, counts, 0))
    return key, left


@Kernel
def tile_length(found, size, span, whole):  # type: ignore[no-untyped-def]
    """How many entries a program looks at: its tile or its list."""
    tile = tl.program_id(0)
    return tl.where(whole, tl.minimum(span, size - tile.to(tl.int64) * span), tl.load(found + tile)).to(tl.int32)


@Kernel
def tile_entries(bits, lists, first, begin, length, whole, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Some of these entries: where in the tile, keys, and which are there."""
    j = begin + tl.arange(0, WIDTH)
    inside = j < length
    j = tl.where(whole, j, tl.load(lists + first + j, j < tl.where(whole, 0, length), 0))
    return j, key_of(tl.load(bits + first + j, inside, 0)), inside


@Kernel
def digits_kernel(  # type: ignore[no-untyped-def]
    bits, state, lists, found, size: int, span, most: int, DIGIT: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr
):
    SHIFT: tl.constexpr = 24 - 8 * DIGIT
    first = tl.program_id(0).to(tl.int64) * span
    whole = tl.load(state + FOUND) < most
    length = tile_length(found, size, span, whole)
    bins = tl.arange(0, 256)
    for rank in range(RANKS):
        prefix, left = rank_key(state, rank, DIGIT, RANKS)
        cell = DIGIT * RANKS + rank
        if tl.program_id(0) == 0:
            tl.store(state + DIGITS + 2 * cell, prefix)
            tl.store(state + DIGITS + 2 * cell + 1, left)
        counts = tl.zeros((256,), tl.int32)
        for begin in range(0, length, WIDTH):
            _, key, inside = tile_entries(bits, lists, first, begin, length, whole, WIDTH)
            mine = inside & (((key >> (SHIFT + 7)) >> 1) == prefix)  # in two steps: 32 would exceed the word
            counts += tl.histogram(tl.where(mine, (key >> SHIFT) & 255, 0), 256)
        # nobody asks how many have digit 0, where all others are
        tl.atomic_add(state + DIGITS + 8 * RANKS + 256 * cell + bins, counts.to(tl.int64), (bins > 0) & (counts > 0))


@Kernel
def rank_band(state, MOST: tl.constexpr):  # type: ignore[no-untyped-def]
    """The band of the first rank's key alone; none counts above ``MOST``."""
    key, _ = rank_key(state, 0, 4, 1)
    low = tl.minimum(key, MOST)
    return low, tl.where(low + 1 > MOST, BEYOND, low + 1)


@Kernel
def first_band(beyond):  # type: ignore[no-untyped-def]
    """Before any threshold is tried: what is not finite is chosen first."""
    finite = beyond < INFINITE
    return tl.where(finite, 0, INFINITE).to(tl.int64), tl.where(finite, INFINITE, BEYOND).to(tl.int64)


@Kernel
def count_kernel(  # type: ignore[no-untyped-def]
    bits, state, lists, found, counts, size: int, span,
    MOST: tl.constexpr, TILED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Of a tile, the entries above the band and in it. ``MOST`` 0: the band is in the state."""
    tile = tl.program_id(0)
    first = tile.to(tl.int64) * span
    if MOST > 0:
        low, high = rank_band(state, MOST)
        if tile == 0:
            tl.store(state + LOW, low)
            tl.store(state + HIGH, high)
    else:
        low, high = tl.load(state + LOW), tl.load(state + HIGH)
    low, high = low.to(tl.int32), high.to(tl.int32)
    whole = low < tl.load(state + BOUND)
    length = tile_length(found, size, span, whole)
    above, reach = tl.zeros((WIDTH,), tl.int32), tl.zeros((WIDTH,), tl.int32)
    for begin in range(0, length, WIDTH):
        _, key, inside = tile_entries(bits, lists, first, begin, length, whole, WIDTH)
        above += (inside & (key >= high)).to(tl.int32)
        reach += (inside & (key >= low)).to(tl.int32)
    tl.store(counts + tile, tl.sum(above))
    tl.store(counts + TILED + tile, tl.sum(reach - above))


@Kernel
def window_places(q, start, need, n):  # type: ignore[no-untyped-def]
    """How many of the band's first q entries are in the window."""
    return tl.minimum(tl.maximum(q - start, 0), tl.minimum(need, n - start)) + tl.minimum(
        q, tl.maximum(start + need - n, 0)
    )


@Kernel
def write_kernel(  # type: ignore[no-untyped-def]
    bits, state, lists, found, counts, out, size: int, span, k: int, share,
    LINE: tl.constexpr, WIDE: tl.constexpr, TILED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Choose by the band rule. ``share``: where the window begins, a number in [0, 1) as twice its 53 bits, and 3."""
    WORD: tl.constexpr = tl.int64 if WIDE else tl.int32
    tile = tl.program_id(0)
    first = tile.to(tl.int64) * span
    low, high = tl.load(state + LOW).to(tl.int32), tl.load(state + HIGH).to(tl.int32)
    whole = low < tl.load(state + BOUND)
    length = tile_length(found, size, span, whole)
    tiles = tl.arange(0, TILED)
    there = tiles < tl.num_programs(0)
    sure = tl.load(counts + tiles, there, 0).to(WORD)
    band = tl.load(counts + TILED + tiles, there, 0).to(WORD)
    n, need = tl.sum(band), (k - tl.sum(sure)).to(WORD)
    last = n - need if LINE else n - 1
    start = tl.minimum(((last + 1).to(tl.float64) * ((share >> 1) - 1).to(tl.float64) * 2**-53).to(WORD), last)
    p = tl.sum(tl.where(tiles < tile, sure, 0))
    q = tl.sum(tl.where(tiles < tile, band, 0))
    for begin in range(0, length, WIDTH):
        j, key, inside = tile_entries(bits, lists, first, begin, length, whole, WIDTH)
        above = (inside & (key >= high)).to(WORD)
        within = (inside & (key >= low) & (key < high)).to(WORD)
        p_here, q_here = p + tl.cumsum(above, 0) - above, q + tl.cumsum(within, 0) - within
        before = window_places(q_here, start, need, n)
        chosen = above + window_places(q_here + within, start, need, n) - before
        tl.store(out + p_here + before, first + j, chosen > 0)
        p += tl.sum(above)
        q += tl.sum(within)


class Ranked:
    """The keys of one to three ranks among the magnitudes of ``x``, fp32 on a GPU: from 1, the largest, to its size.

    Attributes:
        state: see above.
        sums: of magnitudes to the power ``moment``, in parts ``[TILES]``, ``programs`` of them.
    """

    def __init__(self, x: Tensor, ranks: tuple[int, ...], moment: int = 0) -> None:
        self._bits = x.contiguous().view(torch.int32)
        self.size, most = x.numel(), max(ranks)
        self._span = BLOCK * -(-self.size // (BLOCK * TILES))
        self.programs = -(-self.size // self._span)
        cells = DIGITS + 1032 * len(ranks)
        self.state = x.new_empty(cells, dtype=torch.int64)
        self.sums = x.new_empty(TILES if moment else 0, dtype=torch.float64)
        self._lists = x.new_empty(self.size, dtype=torch.int32)
        self._found = x.new_empty(TILES, dtype=torch.int32)
        stride = (self.size // SAMPLES) | 1
        expected = most / self.size * min(SAMPLES, -(-self.size // stride))
        place = math.ceil(expected + 4 * math.sqrt(expected) + 4) if self.size > SMALL else SAMPLES + 1
        sample_kernel(
            1, self._bits, self.state, self.size, stride, place, *(*ranks, 0, 0)[:3], CELLS=cells, SAMPLED=SAMPLES,
        )  # fmt: skip
        gather_kernel(
            self.programs, self._bits, self.state, self._lists, self._found, self.sums, self.size, self._span,
            MOMENT=moment, WIDTH=BLOCK,
        )  # fmt: skip
        for digit in range(4):
            digits_kernel(
                self.programs, *self._tiles(), self.size, self._span, most, DIGIT=digit, RANKS=len(ranks), WIDTH=BLOCK
            )

    def take(self, k: int, u: float, window: str, most: int = 0) -> Tensor:
        """Return ``k`` indices (int64), ascending, by the band rule; u in [0, 1) says where the window begins.

        ``most``, if not 0: the band is that of the first rank, see ``rank_band``; else it is in the state.
        """
        counts = self.state.new_empty(2 * TILES, dtype=torch.int32)
        out = self.state.new_empty(k)
        count_kernel(
            self.programs, *self._tiles(), counts, self.size, self._span,
            MOST=most, TILED=TILES, WIDTH=BLOCK,
        )  # fmt: skip
        write_kernel(
            self.programs, *self._tiles(), counts, out, self.size, self._span, k, int(u * 2**53) * 2 + 3,
            LINE=window == "line", WIDE=self.size >= 1 << 31, TILED=TILES, WIDTH=BLOCK,
        )  # fmt: skip
        return out

    def _tiles(self) -> tuple[Tensor, ...]:
        return self._bits, self.state, self._lists, self._found
