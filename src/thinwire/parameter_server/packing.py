"""Tensors on the wire: sums as a leader packs them and a server reads them, weights the other way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.parameter_server.compress import Codec, Difference, Feedback
from thinwire.parameter_server.layout import Layout
from thinwire.parameter_server.settings import Settings


def most_bytes(settings: Settings, layout: Layout) -> int:
    """Of any tensor that travels in a training of this model: sums, weights, buffers."""
    item = 8 if settings.deterministic else layout.dtype.itemsize
    sizes = [layout.numel * item, 8 * layout.buffers.numel]
    for kind in (settings.compress_up, settings.compress_down):
        if kind:
            sizes.append(Codec(kind, settings.density).size(layout.numel, layout.dtype))
    return max(sizes)


class SumsOut:
    """Packs a leader's sums. What compression leaves out is kept as a residual, across memberships too.

    Args:
        settings: the server's.
        dtype: of the weights.
        pieces: slices of the flat vector, one per server process that holds weights.
    """

    def __init__(self, settings: Settings, dtype: torch.dtype, pieces: Sequence[slice]) -> None:
        self.settings, self.dtype, self.pieces = settings, dtype, tuple(pieces)
        codec = _codec(settings.compress_up, settings)
        self._feedback = [Feedback(codec) for _ in self.pieces] if codec else None

    def pack(self, total: Tensor) -> list[Tensor]:
        """A sum ``[D]`` as it goes over the wire, a tensor per piece."""
        parts = [total[piece] for piece in self.pieces]
        if self._feedback is not None:
            return [feedback.encode(part) for feedback, part in zip(self._feedback, parts)]
        dtype = torch.float64 if self.settings.deterministic else self.dtype
        return [part.to(dtype) for part in parts]

    def weights_in(self) -> WeightsIn:
        """What reads the weights of a new membership, in the same pieces."""
        return WeightsIn(self.settings, self.dtype, len(self.pieces))


class WeightsIn:
    """Reads a leader's weights, of one membership: the first come whole.

    Args:
        settings: the server's.
        dtype: of the weights.
        count: pieces.
    """

    def __init__(self, settings: Settings, dtype: torch.dtype, count: int) -> None:
        self._dtype = dtype
        codec = _codec(settings.compress_down, settings)
        self._held = [Difference(codec) for _ in range(count)] if codec else None

    def unpack(self, piece: int, message: Tensor, delta: bool) -> Tensor:
        """The weights of a piece, from bytes: whole ones, or a difference to those before.

        Raises:
            ValueError: the length does not fit, or nothing came before.
        """
        if delta:
            if self._held is None or self._held[piece].held is None:
                raise ValueError("a difference of weights came before the weights")
            return self._held[piece].receive(message)
        theta = message.view(self._dtype)
        if self._held is not None:
            self._held[piece].start(theta)
        return theta


class ServerEnd:
    """The end of a process that holds weights, all of them or a slice.

    Args:
        settings: of the run.
        numel: elements that it holds.
        dtype: of the weights.
    """

    def __init__(self, settings: Settings, numel: int, dtype: torch.dtype) -> None:
        self._settings, self._numel, self._dtype = settings, numel, dtype
        self._up = _codec(settings.compress_up, settings)
        self._down = _codec(settings.compress_down, settings)
        self._held: dict[int, Difference] = {}

    def sum(self, message: Tensor) -> Tensor:
        """A sum from bytes.

        Raises:
            ValueError: the length does not fit.
        """
        if self._up is not None:
            return self._up.decode(message, self._numel, self._dtype)
        dtype = torch.float64 if self._settings.deterministic else self._dtype
        if message.numel() != self._numel * dtype.itemsize:
            raise ValueError(f"a sum of {message.numel()} bytes does not fit this model")
        return message.view(dtype)

    def weights(self, member: int, theta: Tensor) -> tuple[Tensor, bool]:
        """What to send a member, and whether it is a difference to what it has."""
        if self._down is None:
            return theta, False
        return self._held.setdefault(member, Difference(self._down)).encode(theta)

    def forget(self, member: int) -> None:
        """A member has gone."""
        self._held.pop(member, None)


def _codec(kind: str | None, settings: Settings) -> Codec | None:
    return Codec(kind, settings.density) if kind else None
