"""The two-step program of ``Cast`` in 8, 4, 2 or 1 bits: few bits in both halves of an all-reduce, no error lost.

A = M + E over the bucket, in P chunks; rank r owns the r-th. All-to-all of the encoded chunks. The owner adds what it
received in rank order, encodes the sum and sends it to all ranks. E = A minus what was sent, decoded; the owner adds
the error of the second encoding to its chunk, so one residual per rank is enough to lose nothing.

Two ranks gather each other's messages instead: as many bytes, but one collective and one encoding. So do more ranks in
1 bit, where a sum that is encoded again is too coarse: local steps that end at 1.68 in 2 bits ended at 1.88. The bytes
then grow with the number of ranks: from four on they are as many as in 2 bits.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.core.kernels.quantise import decode_sum, encode, encode_means
from thinwire.core.methods.base import accumulate_flat, all_finite, poison, split_message, stage_flat
from thinwire.core.methods.prices import ACCUMULATE, COPY, DECODE, ENCODE, ERROR, IN_PLACE, MEANS, Prices
from thinwire.core.program import AllGather, AllToAll, Bucket, Program, State


@dataclass(frozen=True)
class Code:
    """The format of a chunk of ``blocks`` blocks as a message: scales, then means, then codes.

    8 and 4 bits: linear, with a scale for each block of ``size``. 2 and 1: bins, and their means for each message.
    """

    bits: int
    blocks: int
    size: int

    @classmethod
    def of(cls, bits: int, block: int, elements: int, ranks: int) -> Code:
        """Return a bucket's code: blocks of one size, at most ``block``, a multiple of 8, so that padding is small."""
        chunk = -(-elements // ranks)
        blocks = -(-chunk // block)
        size = -(-chunk // blocks)
        return cls(bits, blocks, size if bits == 8 else size + -size % 8)  # a block's codes are whole bytes

    @property
    def chunk(self) -> int:
        return self.blocks * self.size

    def encode(self, a: Tensor) -> Tensor:
        """Return a message for each chunk of ``a``, ``[chunks, bytes]``. Leave the encoding error in ``a``."""
        chunks = a.numel() // self.chunk
        if self.bits > 2:
            codes, scales = encode(a, self.bits, self.size, leave_error=True)
            head = scales.view(chunks, -1)
        else:
            codes, scales, means = encode_means(a, self.bits, self.size, chunks)
            a.sub_(decode_sum(a.new_empty(len(a)), codes[None], scales[None], self.bits, self.size, means[None]))
            head = torch.cat([scales.view(chunks, -1), means], dim=1)
        return torch.cat([head.view(torch.uint8), codes.view(chunks, -1)], dim=1)

    def decode(self, messages: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the decoded messages, one chunk after another; and whether all of it is finite."""
        codes, scales, means = self._split(messages, dtype)
        out = torch.empty(len(messages) * self.chunk, dtype=dtype, device=messages.device)
        rows = codes.reshape(1, -1), scales.reshape(1, -1)
        return decode_sum(out, *rows, self.bits, self.size, None if means is None else means[None]), all_finite(scales)

    def finite(self, messages: Tensor, dtype: torch.dtype) -> Tensor:
        return all_finite(self._split(messages, dtype)[1])

    def decode_sum(self, messages: Tensor, dtype: torch.dtype) -> Tensor:
        codes, scales, means = self._split(messages, dtype)
        out = torch.empty(self.chunk, dtype=dtype, device=messages.device)
        return decode_sum(out, codes, scales, self.bits, self.size, None if means is None else means[:, None])

    def _split(self, messages: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        head, codes = split_message(messages, self.blocks + (0 if self.bits > 2 else 2**self.bits), dtype)
        return codes, head[:, : self.blocks], None if self.bits > 2 else head[:, self.blocks :]


def two_step(bucket: Bucket, state: State, bits: int, block: int, *, feedback: bool = True) -> Program:
    """All-to-all of codes, sum, encode again, all-gather. Without ``feedback`` nothing is kept for later."""
    n, ranks = bucket.numel, state.size
    if _gathers(bits, ranks):
        yield from _gathered(bucket, state, Code.of(bits, block, n, 1), feedback)
        return
    code = Code.of(bits, block, n, ranks)
    a = accumulate_flat(bucket, state, ranks * code.chunk) if feedback else _padded(bucket, ranks * code.chunk)
    total = yield from scatter(a, code)
    everyone = yield AllGather(code.encode(total).view(-1))
    if feedback:
        a[state.rank * code.chunk : (state.rank + 1) * code.chunk] += total
        stage_flat(bucket, state, a[:n])
    mean, finite = code.decode(everyone, a.dtype)
    state.verdict(finite)
    bucket.write_gradient(mean[:n].div_(poison(finite, ranks, a.dtype)))


def _gathers(bits: int, ranks: int) -> bool:
    return bits == 1 or ranks <= 2


def _gathered(bucket: Bucket, state: State, code: Code, feedback: bool) -> Program:
    """All-gather of codes, and their sum on all ranks."""
    n = bucket.numel
    a = accumulate_flat(bucket, state, code.chunk) if feedback else _padded(bucket, code.chunk)
    everyone = yield AllGather(code.encode(a).view(-1))
    if feedback:
        stage_flat(bucket, state, a[:n])
    total, finite = code.decode_sum(everyone, a.dtype), code.finite(everyone, a.dtype)
    state.verdict(finite)
    bucket.write_gradient(total[:n].div_(poison(finite, state.size, a.dtype)))


def _padded(bucket: Bucket, size: int) -> Tensor:
    gradient = bucket.gradient()
    return torch.nn.functional.pad(gradient, (0, size - gradient.numel()))


def scatter(a: Tensor, code: Code) -> Generator[Any, Tensor, Tensor]:
    """Do the first step, half of an all-reduce: each rank receives the sum of its own chunk.

    ``a`` holds a chunk for each rank, fp32 or fp64; the encoding error is left there.
    """
    received = yield AllToAll(code.encode(a))
    return code.decode_sum(received, a.dtype)


def payload(sizes: Sequence[int], bits: int, block: int) -> list[int]:
    """Return the bits of each element and a scale per block, in units of fp32 elements, rounded up."""
    return [-(-size * bits // 32) + -(-size // block) for size in sizes]


def seconds(size: int, ranks: int, bits: int, prices: Prices) -> list[float]:
    """Accumulate and encode; sum and encode a chunk; decode all. Who gathers leaves the second encoding out."""
    encode = ENCODE + ERROR + bits / 8  # codes of 8 bits, written and read, are a quarter of a pass of fp32 each
    if bits <= 2:
        encode += MEANS + DECODE
    before = prices.passes(ACCUMULATE + encode, size)
    if _gathers(bits, ranks):
        return [before, prices.passes(DECODE * ranks + IN_PLACE + COPY, size)]
    between = prices.passes(DECODE * ranks + encode, size / ranks)
    after = prices.passes(ACCUMULATE, size / ranks) + prices.passes(DECODE + IN_PLACE + COPY, size)
    return [before, between, after]
