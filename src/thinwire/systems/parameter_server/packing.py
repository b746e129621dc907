"""How tensors are sent: sums packed by a leader and read by a server, weights the other way round."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.systems.parameter_server.compress import Codec, Difference, Feedback
from thinwire.systems.parameter_server.layout import Layout
from thinwire.systems.parameter_server.settings import Settings


def most_bytes(settings: Settings, layout: Layout) -> int:
    """Return the size of the largest tensor sent when training this model: sums, weights or buffers."""
    item = 8 if settings.deterministic else layout.dtype.itemsize
    sizes = [layout.numel * item, 8 * layout.buffers.numel]
    for kind in (settings.compress_up, settings.compress_down):
        if kind:
            sizes.append(Codec(kind, settings.density).size(layout.numel, layout.dtype))
    return max(sizes)


class SumsOut:
    """Packs a leader's sums. What compression leaves out is kept as a residual, also across memberships.

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
        """Return what is sent of a sum ``[D]``, one tensor per piece."""
        parts = [total[piece] for piece in self.pieces]
        if self._feedback is not None:
            return [feedback.encode(part) for feedback, part in zip(self._feedback, parts)]
        dtype = torch.float64 if self.settings.deterministic else self.dtype
        return [part.to(dtype) for part in parts]

    def weights_in(self) -> WeightsIn:
        """Return the reader of the weights of a new membership, with the same pieces."""
        return WeightsIn(self.settings, self.dtype, len(self.pieces))


class WeightsIn:
    """Reads a leader's weights during one membership; the first weights are whole.

    Args:
        settings: the server's.
        dtype: of the weights.
        count: number of pieces.
    """

    def __init__(self, settings: Settings, dtype: torch.dtype, count: int) -> None:
        self._dtype = dtype
        codec = _codec(settings.compress_down, settings)
        self._held = [Difference(codec) for _ in range(count)] if codec else None

    def unpack(self, piece: int, message: Tensor, delta: bool) -> Tensor:
        """Return the weights of one piece, from the bytes of the weights or of a difference from the previous ones.

        Raises:
            ValueError: the length is wrong, or a difference came before any weights.
        """
        if delta:
            if self._held is None or self._held[piece].held is None:
                raise ValueError("a difference of weights arrived before the weights")
            return self._held[piece].receive(message)
        theta = message.view(self._dtype)
        if self._held is not None:
            self._held[piece].start(theta)
        return theta


class ServerEnd:
    """The side of a process that holds weights, all of them or a slice.

    Args:
        settings: of the run.
        numel: number of elements that it holds.
        dtype: of the weights.
    """

    def __init__(self, settings: Settings, numel: int, dtype: torch.dtype) -> None:
        self._settings, self._numel, self._dtype = settings, numel, dtype
        self._up = _codec(settings.compress_up, settings)
        self._down = _codec(settings.compress_down, settings)
        self._held: dict[int, Difference] = {}

    def sum(self, message: Tensor) -> Tensor:
        """Return a sum, decoded from bytes.

        Raises:
            ValueError: the length is wrong.
        """
        if self._up is not None:
            return self._up.decode(message, self._numel, self._dtype)
        dtype = torch.float64 if self._settings.deterministic else self._dtype
        if message.numel() != self._numel * dtype.itemsize:
            raise ValueError(f"a sum of {message.numel()} bytes does not fit this model")
        return message.view(dtype)

    def weights(self, member: int, theta: Tensor) -> tuple[Tensor, bool]:
        """Return what to send to a member, and whether it is a difference from what the member has."""
        if self._down is None:
            return theta, False
        return self._held.setdefault(member, Difference(self._down)).encode(theta)

    def forget(self, member: int) -> None:
        """Forget a member that has gone."""
        self._held.pop(member, None)


def _codec(kind: str | None, settings: Settings) -> Codec | None:
    return Codec(kind, settings.density) if kind else None
