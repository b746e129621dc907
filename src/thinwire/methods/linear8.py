"""The two-step program of ``Cast("int8")``: 8 bits on both halves of an all-reduce, with both errors fed back.

A = M + E over the bucket, in P chunks of which rank r owns the r-th. All-to-all of the encoded chunks; the owner adds
what it received in rank order, encodes the sum and sends it to everybody. E = A minus what was sent, decoded; the
owner adds the error of the second encoding to its chunk, so that nothing is lost with one residual per rank.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels.quantise import add_decoded, encode
from thinwire.methods.base import all_finite, poison, split_message
from thinwire.methods.feedback import accumulate_flat, stage_flat
from thinwire.methods.prices import ACCUMULATE, COPY, DECODE, ENCODE, IN_PLACE, WRITE, Prices
from thinwire.program import AllGather, AllToAll, Bucket, Program, State

_BITS = 8


def two_step(bucket: Bucket, state: State, block: int) -> Program:
    """All-to-all of codes, sum, encode again, all-gather."""
    n = bucket.numel
    blocks, size = _layout(n, state.size, block)
    chunk = blocks * size
    a = accumulate_flat(bucket, state, state.size * chunk)
    total = yield from scatter(a, state.size, size)
    codes, scales = encode(total, _BITS, size)
    everyone = yield AllGather(torch.cat([scales.view(torch.uint8), codes]))
    add_decoded(total, codes[None], -scales[None], _BITS, size)
    a[state.rank * chunk : (state.rank + 1) * chunk] += total
    stage_flat(bucket, state, a[:n])
    scales, codes = split_message(everyone, blocks, a.dtype)
    finite = all_finite(scales)
    state.verdict(finite)
    mean = torch.zeros(a.numel(), dtype=a.dtype, device=a.device)
    add_decoded(mean, codes.reshape(1, -1), scales.reshape(1, -1), _BITS, size)
    bucket.write_gradient(mean[:n].div_(poison(finite, state.size, a.dtype)))


def scatter(a: Tensor, ranks: int, size: int) -> Generator[Any, Tensor, Tensor]:
    """The first step, half of an all-reduce: each rank receives the sum of its own chunk, ``[n / ranks]``.

    Args:
        a: ``[n]``, fp32 or fp64, a chunk of whole blocks for each rank; what was not sent of it is left there.
        ranks: of the world.
        size: elements in a block.
    """
    codes, scales = encode(a, _BITS, size)
    add_decoded(a, codes[None], -scales[None], _BITS, size)
    scales = scales.view(ranks, -1)
    received = yield AllToAll(torch.cat([scales.view(torch.uint8), codes.view(ranks, -1)], dim=1))
    total = torch.zeros(a.numel() // ranks, dtype=a.dtype, device=a.device)
    scales, codes = split_message(received, scales.shape[1], a.dtype)
    add_decoded(total, codes, scales, _BITS, size)
    return total


def payload(sizes: Sequence[int], block: int) -> list[int]:
    """A byte per element and a scale per block, in units of fp32 elements, rounded up."""
    return [-(-size // 4) + -(-size // block) for size in sizes]


def seconds(size: int, ranks: int, prices: Prices) -> list[float]:
    """Accumulate, encode, decode one's own; sum and encode a chunk; decode all."""
    before = prices.passes(ACCUMULATE + ENCODE + DECODE + 1.0, size)  # an int8 is a quarter of a pass
    between = prices.passes(WRITE + DECODE * ranks + ENCODE + 0.5, size / ranks)
    after = prices.passes(DECODE + ACCUMULATE, size / ranks) + prices.passes(WRITE + DECODE + IN_PLACE + COPY, size)
    return [before, between, after]


def _layout(n: int, ranks: int, block: int) -> tuple[int, int]:
    """Blocks per chunk and elements per block, at most ``block``: equal ones, so that the padding stays small."""
    chunk = -(-n // ranks)
    blocks = -(-chunk // block)
    return blocks, -(-chunk // blocks)
