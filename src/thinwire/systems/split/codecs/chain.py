"""A chain of codecs for one direction: at most one value codec, then optionally "pack" (only real tokens)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.systems.split.codecs.base import Codec
from thinwire.systems.split.codecs.cast import DTYPES, CastCodec
from thinwire.systems.split.codecs.delta import Delta
from thinwire.systems.split.codecs.quantised import Quantised

WORDS = ("fp16", "bf16", "int8", "int4", "delta:2", "delta:4", "delta:8", "pack")


@dataclass(frozen=True)
class Visit:
    """What both ends know about a batch besides its numbers.

    Attributes:
        lengths: real tokens per sample; None: no padding.
        slots: the samples' indices, for delta.
        training: False: evaluation, which changes no cache; delta then sends the numbers as they are.
    """

    lengths: Sequence[int] | None
    slots: Sequence[int] | None = None
    training: bool = True


class Chain:
    """The codecs of one direction, with their state.

    Attributes:
        packs: whether only real tokens are sent.
        values: the value codec.
    """

    def __init__(self, words: Sequence[str], direction: str = "up", carries: str | None = None) -> None:
        check_chain(words, direction, carries)
        self.packs = "pack" in words
        names = [word for word in words if word != "pack"]
        self.values = _codec(names[0]) if names else Codec()

    @property
    def needs_slots(self) -> bool:
        """Whether the samples' indices must be sent."""
        return isinstance(self.values, Delta)

    def encode(self, x: Tensor, visit: Visit) -> list[Tensor]:
        """Return the parts for ``[B, L, w]``: with "pack" rows ``[n, ...]`` of real tokens, else ``[B, L, ...]``."""
        x = x.detach()
        if isinstance(self.values, Delta):
            if not visit.training:
                return [_real_rows(x, visit.lengths)]
            lengths = _lengths(visit, x)
            rows = [sample[:count] for sample, count in zip(x, lengths)]
            return self.values.encode_visits(rows, list(visit.slots or ()))
        if self.packs:
            return self.values.encode(_real_rows(x, visit.lengths))
        parts = self.values.encode(x.reshape(-1, x.shape[-1]))
        return [part.view(*x.shape[:2], *part.shape[1:]) for part in parts]

    def decode(self, parts: Sequence[Tensor], visit: Visit, width: int, dtype: torch.dtype, length: int = 0) -> Tensor:
        """Return the numbers ``[B, L, width]`` of ``dtype``; padding is zero if only real tokens were sent.

        Args:
            parts: as received.
            visit: of the batch.
            width: numbers per token.
            dtype: of the model.
            length: L, if only real tokens were sent; 0: that of the longest sample.

        Raises:
            ValueError: the parts are not what this chain sends for such a batch.
        """
        if isinstance(self.values, Delta) and visit.training:
            lengths = list(visit.lengths or ())
            if visit.slots is None or len(visit.slots) != len(lengths) or not lengths:
                raise ValueError("the other end did not send a slot per sample, which delta needs")
            rows = self.values.decode_visits(parts, visit.slots, lengths, width).to(dtype)
            return _spread(rows, lengths, length)
        values = Codec() if isinstance(self.values, Delta) else self.values
        if self.packs:
            rows = values.decode(parts, width, dtype)
            lengths = list(visit.lengths or ())
            if len(rows) != sum(lengths) or not lengths:
                raise ValueError(f"the other end sent {len(rows)} tokens, but its lengths sum to {sum(lengths)}")
            return _spread(rows, lengths, length)
        if not parts or any(part.dim() < 2 or part.shape[:2] != parts[0].shape[:2] for part in parts):
            raise ValueError("the other end sent parts that are not [B, L, ...]")
        lead = tuple(parts[0].shape[:2])
        rows = values.decode([part.reshape(-1, *part.shape[2:]) for part in parts], width, dtype)
        if visit.lengths is not None and (len(visit.lengths) != lead[0] or max(visit.lengths, default=0) > lead[1]):
            raise ValueError(f"the other end sent {lead[0]} x {lead[1]} tokens, which do not fit its lengths")
        return rows.view(*lead, width)

    def nbytes(self, batch: int, length: int, visit: Visit, width: int, itemsize: int, fresh: int = 0) -> int:
        """Return the exact bytes of the parts; ``fresh`` counts the real tokens on their first visit (delta only)."""
        tokens = sum(visit.lengths) if self.packs and visit.lengths is not None else batch * length
        if isinstance(self.values, Delta):
            if not visit.training:
                return tokens * width * itemsize
            return fresh * 4 * width + (tokens - fresh) * self.values.bytes_per_row(width, itemsize)
        return tokens * self.values.bytes_per_row(width, itemsize)

    def frames(self, training: bool) -> list[int]:
        """Return the number of dimensions of each part."""
        lead = 1 if self.packs else 2
        if isinstance(self.values, Delta) and training:
            return [2, 2, 1]
        return [lead + 1, lead] if isinstance(self.values, Quantised) else [lead + 1]

    def state(self) -> dict[str, Any]:
        return self.values.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self.values.load_state(state)


def check_chain(words: Sequence[str], direction: str, carries: str | None = None) -> None:
    """Raise ``ValueError`` for an unknown codec or a wrong order.

    Args:
        words: of the chain.
        direction: "up" or "down", for the error message.
        carries: "activation" or "gradient"; None: what goes that way if the front is at the edge.
    """
    for word in words:
        if word not in WORDS:
            raise ValueError(f"{direction}: codec {word!r} is unknown; use some of {', '.join(WORDS)}")
    values = [word for word in words if word != "pack"]
    if len(values) > 1 or len(words) > 1 + len(values) or (values and words[0] != values[0]):
        raise ValueError(f"{direction}: {','.join(words)} is not a chain: use one value codec, then pack: int8,pack")
    if values and values[0].startswith("delta"):
        if (carries or {"up": "activation", "down": "gradient"}[direction]) == "gradient":
            raise ValueError(f"{direction}: delta is for activations, which recur with their sample; use int8 or int4")
        if "pack" not in words:
            raise ValueError(f"{direction}: delta keeps a row per real token: use {values[0]},pack")


def _codec(word: str) -> Codec:
    if word in DTYPES:
        return CastCodec(word)
    if word.startswith("int"):
        return Quantised(int(word.removeprefix("int")))
    return Delta(int(word.partition(":")[2]))


def _lengths(visit: Visit, x: Tensor) -> list[int]:
    return [x.shape[1]] * len(x) if visit.lengths is None else list(visit.lengths)


def _real_rows(x: Tensor, lengths: Sequence[int] | None) -> Tensor:
    """Return the real tokens of ``[B, L, w]`` as ``[n, w]``, sample by sample."""
    if lengths is None:
        return x.reshape(-1, x.shape[-1])
    return torch.cat([sample[:count] for sample, count in zip(x, lengths)])


def _spread(rows: Tensor, lengths: Sequence[int], length: int) -> Tensor:
    """Return the inverse of ``_real_rows``, with zeros at padding."""
    out = rows.new_zeros(len(lengths), length or max(lengths), rows.shape[1])
    for sample, part in zip(out, rows.split(list(lengths))):
        sample[: len(part)] = part
    return out
