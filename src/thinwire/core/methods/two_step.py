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

from thinwire.core.kernels.quantise.bins import encode_bins
from thinwire.core.kernels.quantise.codes import decode_sum
from thinwire.core.kernels.quantise.linear import encode
from thinwire.core.methods.base import accumulate_flat, all_finite, poison, stage_flat
from thinwire.core.methods.prices import ACCUMULATE, COPY, DECODE, ENCODE, ERROR, IN_PLACE, MEANS, Prices
from thinwire.core.program import AllGather, AllToAll, Bucket, Program, State


@dataclass(frozen=True)
class Code:
    """The format of a chunk of ``blocks`` blocks as a message: scales and means, then codes.

    Both parts begin at multiples of 16 bytes, so that a GPU reads them in wide words.

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
        messages = torch.empty(chunks, self.message_bytes(a.dtype), dtype=torch.uint8, device=a.device)
        codes, scales, means = self._split(messages, a.dtype)
        if means is None:
            encode(a, self.bits, self.size, leave_error=True, out=(codes, scales))
        else:
            encode_bins(a, self.bits, self.size, chunks, out=(codes, scales, means))
            decode_sum(a, codes[None], scales[None], self.bits, self.size, values=means[None], take=True)
        return messages

    def message_bytes(self, dtype: torch.dtype) -> int:
        """Return the size of a chunk's message."""
        return self._begin(dtype) + _whole(self.chunk * self.bits // 8)

    def sum_encode(self, messages: Tensor, dtype: torch.dtype, error: Tensor | None) -> Tensor:
        """Return the message of the sum of decoded messages, in their order; add its encoding error to ``error``."""
        total = self.decode_sum(messages, dtype)
        made = self.encode(total)
        if error is not None:
            error += total
        return made[0]

    def decode(self, messages: Tensor, dtype: torch.dtype, divisor: Tensor | None = None) -> Tensor:
        """Return the decoded messages, one chunk after another."""
        return self._decode(messages[None], dtype, divisor)

    def decode_sum(self, messages: Tensor, dtype: torch.dtype, divisor: Tensor | None = None) -> Tensor:
        return self._decode(messages[:, None], dtype, divisor)

    def finite(self, messages: Tensor, dtype: torch.dtype) -> Tensor:
        return all_finite(self._split(messages, dtype)[1])

    def _decode(self, messages: Tensor, dtype: torch.dtype, divisor: Tensor | None) -> Tensor:
        codes, scales, means = self._split(messages, dtype)
        out = torch.empty(messages.shape[1] * self.chunk, dtype=dtype, device=messages.device)
        return decode_sum(out, codes, scales, self.bits, self.size, divisor, values=means)

    def _split(self, messages: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        begin, head = self._begin(dtype), messages.view(dtype)
        codes, scales = messages[..., begin : begin + self.chunk * self.bits // 8], head[..., : self.blocks]
        return codes, scales, None if self.bits > 2 else head[..., self.blocks : self.blocks + 2**self.bits]

    def _begin(self, dtype: torch.dtype) -> int:
        return _whole((self.blocks + (0 if self.bits > 2 else 2**self.bits)) * dtype.itemsize)


def _whole(size: int) -> int:
    return size + -size % 16


def two_step(bucket: Bucket, state: State, bits: int, block: int, *, feedback: bool = True) -> Program:
    """All-to-all of codes, sum, encode again, all-gather. Without ``feedback`` nothing is kept for later."""
    n, ranks = bucket.numel, state.size
    if _gathers(bits, ranks):
        yield from _gathered(bucket, state, Code.of(bits, block, n, 1), feedback)
        return
    code = Code.of(bits, block, n, ranks)
    a = accumulate_flat(bucket, state, ranks * code.chunk) if feedback else _padded(bucket, ranks * code.chunk)
    received = yield AllToAll(code.encode(a))
    own = a[state.rank * code.chunk : (state.rank + 1) * code.chunk]
    everyone = yield AllGather(code.sum_encode(received, a.dtype, own if feedback else None))
    if feedback:
        stage_flat(bucket, state, a[:n])
    finite = code.finite(everyone, a.dtype)
    state.verdict(finite)
    bucket.write_gradient(code.decode(everyone, a.dtype, poison(finite, ranks, a.dtype))[:n])


def _gathers(bits: int, ranks: int) -> bool:
    return bits == 1 or ranks <= 2


def _gathered(bucket: Bucket, state: State, code: Code, feedback: bool) -> Program:
    """All-gather of codes, and their sum on all ranks."""
    n = bucket.numel
    a = accumulate_flat(bucket, state, code.chunk) if feedback else _padded(bucket, code.chunk)
    everyone = yield AllGather(code.encode(a).view(-1))
    if feedback:
        stage_flat(bucket, state, a[:n])
    finite = code.finite(everyone, a.dtype)
    state.verdict(finite)
    bucket.write_gradient(code.decode_sum(everyone, a.dtype, poison(finite, state.size, a.dtype))[:n])


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
