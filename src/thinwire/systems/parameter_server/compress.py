"""Compression in both directions: sparse or 8-bit sums up with error feedback, sparse or 8-bit differences down.

Differences go down as in dual-way gradient sparsification (DGS, arXiv 1910.10929): the server knows what each leader
holds and sends the largest part of the difference; the rest stays in the next difference, so nothing is lost.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.core.kernels.pairs import message_bytes, pack, unpack
from thinwire.core.kernels.quantise import decode_sum, encode
from thinwire.core.kernels.select import keep_count, top_k

BITS = 8
BLOCK = 256


class Codec:
    """Encode a flat vector in fewer bytes, and decode it.

    Args:
        kind: "topk" or "int8".
        density: share of the elements that "topk" keeps.
    """

    def __init__(self, kind: str, density: float) -> None:
        self.kind, self.density = kind, density

    def encode(self, x: Tensor) -> Tensor:
        """Encode a vector: ``[D]`` -> ``uint8 [n]``."""
        if self.kind == "topk":
            values, indices = top_k(x, keep_count(x.numel(), self.density))
            return pack(values, indices)
        codes, scales = encode(x, BITS, BLOCK)
        return torch.cat([scales.view(torch.uint8), codes])

    def size(self, numel: int, dtype: torch.dtype) -> int:
        """Return the bytes of an encoded vector."""
        if self.kind == "topk":
            return message_bytes(keep_count(numel, self.density), dtype)
        return -(-numel // BLOCK) * dtype.itemsize + numel

    def decode(self, message: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Return what :meth:`encode` kept, ``[D]``, zeros elsewhere.

        Raises:
            ValueError: the length is wrong, or an index points outside of the model.
        """
        if message.numel() != self.size(numel, dtype):
            raise ValueError(f"{message.numel()} bytes arrived, but {self.size(numel, dtype)} encode this model")
        out = torch.zeros(numel, dtype=dtype)
        if self.kind == "topk":
            values, indices = unpack(message, keep_count(numel, self.density), dtype)
            if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < numel:
                raise ValueError("a sparse message points outside the model")
            return out.index_copy_(0, indices, values)
        cut = -(-numel // BLOCK) * dtype.itemsize
        scales = message[:cut].clone().view(dtype)
        return decode_sum(out, message[cut:][None], scales[None], BITS, BLOCK)


class Feedback:
    """The sender's side of sums, with error feedback: what one message leaves out is added to the next sum."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.residual: Tensor | None = None

    def encode(self, x: Tensor) -> Tensor:
        """Encode ``x`` plus the residual; what the message leaves out becomes the new residual."""
        total = x if self.residual is None else x + self.residual
        message = self.codec.encode(total)
        self.residual = total - self.codec.decode(message, total.numel(), total.dtype)
        return message


class Difference:
    """Either side of the weights; ``held`` is what the leader has, the same bits on both sides."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.held: Tensor | None = None

    def encode(self, theta: Tensor) -> tuple[Tensor, bool]:
        """Return what to send, and whether it is a difference; the first weights are sent whole."""
        if self.held is None:
            self.held = theta.clone()
            return theta, False
        message = self.codec.encode(theta - self.held)
        self._add(message)
        return message, True

    def receive(self, message: Tensor) -> Tensor:
        """Add a received difference and return the leader's weights."""
        self._add(message)
        assert self.held is not None
        return self.held

    def start(self, theta: Tensor) -> None:
        """Take whole weights as what the leader holds."""
        self.held = theta

    def _add(self, message: Tensor) -> None:
        assert self.held is not None
        self.held = self.held + self.codec.decode(message, self.held.numel(), self.held.dtype)
