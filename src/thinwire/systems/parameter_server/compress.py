"""Compression in both directions: sums up with error feedback, differences down; sparse, or in 8 to 1 bits.

Differences go down as in dual-way gradient sparsification (DGS, arXiv 1910.10929): the server knows what each leader
holds and sends the largest part of the difference; the rest stays in the next difference, so nothing is lost.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.core.kernels.pairs import message_bytes, pack, unpack
from thinwire.core.kernels.select import keep_count, top_k
from thinwire.core.methods.two_step import Code
from thinwire.systems.parameter_server.layout import Layout
from thinwire.systems.parameter_server.settings import Settings

BLOCK = 256


class VectorCodec:
    """Encode a flat vector in fewer bytes, and decode it: "topk" keeps a share of the elements; or "int8" to "int1"."""

    def __init__(self, kind: str, density: float) -> None:
        self.kind, self.density = kind, density

    def _code(self, numel: int) -> Code:
        return Code.of(int(self.kind.removeprefix("int")), BLOCK, numel, 1)

    def encode(self, x: Tensor) -> Tensor:
        if self.kind == "topk":
            return pack(*top_k(x, keep_count(x.numel(), self.density)))
        code = self._code(x.numel())
        return code.encode(torch.nn.functional.pad(x, (0, code.chunk - x.numel()))).view(-1)

    def size(self, numel: int, dtype: torch.dtype) -> int:
        if self.kind == "topk":
            return message_bytes(keep_count(numel, self.density), dtype)
        return self._code(numel).message_bytes(dtype)

    def decode(self, message: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Return what :meth:`encode` kept, ``[D]``, zeros elsewhere."""
        if message.numel() != self.size(numel, dtype):
            raise ValueError(f"{message.numel()} bytes arrived, but {self.size(numel, dtype)} encode this model")
        if self.kind == "topk":
            out = torch.zeros(numel, dtype=dtype)
            values, indices = unpack(message, keep_count(numel, self.density), dtype)
            if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < numel:
                raise ValueError("a sparse message points outside the model")
            return out.index_copy_(0, indices, values)
        return self._code(numel).decode(message.clone()[None], dtype)[:numel]


class Feedback:
    """The sender's side of sums, with error feedback: what one message leaves out is added to the next sum."""

    def __init__(self, codec: VectorCodec) -> None:
        self.codec = codec
        self.residual: Tensor | None = None

    def encode(self, x: Tensor) -> Tensor:
        total = x if self.residual is None else x + self.residual
        message = self.codec.encode(total)
        self.residual = total - self.codec.decode(message, total.numel(), total.dtype)
        return message


class Difference:
    """Either side of the weights; ``held`` is what the leader has, the same bits on both sides."""

    def __init__(self, codec: VectorCodec) -> None:
        self.codec = codec
        self.held: Tensor | None = None

    def encode(self, theta: Tensor) -> tuple[Tensor, bool]:
        """Return what to send, and whether it is a difference; the first weights are sent whole."""
        if self.held is None:
            self.held = theta.clone()
            return theta, False
        message = self.codec.encode(theta - self.held)
        self.receive(message)
        return message, True

    def receive(self, message: Tensor) -> Tensor:
        if self.held is None:
            raise ValueError("a difference of weights arrived before the weights")
        self.held = self.held + self.codec.decode(message, self.held.numel(), self.held.dtype)
        return self.held


def most_bytes(settings: Settings, layout: Layout) -> int:
    """Return the size of the largest tensor sent when training this model: sums, weights or buffers."""
    item = 8 if settings.deterministic else layout.dtype.itemsize
    sizes = [layout.numel * item, 8 * layout.buffers.numel]
    for kind in (settings.compress_up, settings.compress_down):
        if kind:
            sizes.append(VectorCodec(kind, settings.density).size(layout.numel, layout.dtype))
    return max(sizes)


class SumsOut:
    """Packs a leader's sums by ``pieces`` of the flat vector; residuals of compression outlive memberships."""

    def __init__(self, settings: Settings, dtype: torch.dtype, pieces: Sequence[slice]) -> None:
        self.settings, self.dtype, self.pieces = settings, dtype, tuple(pieces)
        codec = _codec(settings.compress_up, settings)
        self._feedback = [Feedback(codec) for _ in self.pieces] if codec else None

    def pack(self, total: Tensor) -> list[Tensor]:
        parts = [total[piece] for piece in self.pieces]
        if self._feedback is not None:
            return [feedback.encode(part) for feedback, part in zip(self._feedback, parts)]
        dtype = torch.float64 if self.settings.deterministic else self.dtype
        return [part.to(dtype) for part in parts]


class WeightsIn:
    """Reads a leader's weights during one membership, with the same pieces; the first weights are whole."""

    def __init__(self, sums: SumsOut) -> None:
        self._dtype, codec = sums.dtype, _codec(sums.settings.compress_down, sums.settings)
        self._held = [Difference(codec) for _ in sums.pieces] if codec else None

    def unpack(self, piece: int, message: Tensor, delta: bool) -> Tensor:
        """Return the weights of one piece, from the bytes of the weights or of a difference from the previous ones."""
        if delta and self._held is None:
            raise ValueError("a difference of weights arrived, but weights are sent whole")
        if delta and self._held is not None:
            return self._held[piece].receive(message)
        theta = message.view(self._dtype)
        if self._held is not None:
            self._held[piece].held = theta
        return theta


class ServerEnd:
    """The side of a process that holds ``numel`` weights, all of them or a slice."""

    def __init__(self, settings: Settings, numel: int, dtype: torch.dtype) -> None:
        self._numel, self._dtype = numel, dtype
        self._sums = torch.float64 if settings.deterministic else dtype
        self._up, self._down = _codec(settings.compress_up, settings), _codec(settings.compress_down, settings)
        self._held: dict[int, Difference] = {}

    def sum(self, message: Tensor) -> Tensor:
        if self._up is not None:
            return self._up.decode(message, self._numel, self._dtype)
        if message.numel() != self._numel * self._sums.itemsize:
            raise ValueError(f"a sum of {message.numel()} bytes does not fit this model")
        return message.view(self._sums)

    def weights(self, member: int, theta: Tensor) -> tuple[Tensor, bool]:
        """Return what to send to a member, and whether it is a difference from what the member has."""
        if self._down is None:
            return theta, False
        return self._held.setdefault(member, Difference(self._down)).encode(theta)

    def forget(self, member: int) -> None:
        self._held.pop(member, None)


def _codec(kind: str | None, settings: Settings) -> VectorCodec | None:
    return VectorCodec(kind, settings.density) if kind else None
