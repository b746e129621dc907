"""Codecs for what crosses the cut: 16 bits per number, 8 or 4 bits, changes since the last visit, real tokens.

A codec turns rows of numbers (one row is one token) into a few tensors, and back. A :class:`Chain` applies those of one
direction: at most one value codec, then optionally "pack", which sends only real tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.core.kernels.quantise.codes import levels, pack_codes, packed_bytes, unpack_codes

WORDS = ("fp16", "bf16", "int8", "int4", "delta:2", "delta:4", "delta:8", "pack")
_16_BITS = {"fp16": torch.float16, "bf16": torch.bfloat16}


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


class Codec:
    """Encodes rows ``[n, w]`` as parts whose first dimension is n. The base class sends them unchanged."""

    name: ClassVar[str] = "none"  # the word for it in a plan

    def encode(self, rows: Tensor) -> list[Tensor]:
        """Return the parts to send."""
        return [rows.contiguous()]

    def decode(self, parts: Sequence[Tensor], width: int, dtype: torch.dtype) -> Tensor:
        """Return the rows ``[n, width]`` of ``dtype``.

        Raises:
            ValueError: the parts do not belong to such rows.
        """
        _check_parts(self.name, parts, [(dtype, (width,))])
        return parts[0]

    def bytes_per_row(self, width: int, itemsize: int) -> int:
        """Return the bytes of one row; ``itemsize`` is that of the model's numbers."""
        return itemsize * width

    def state(self) -> dict[str, Any]:
        """Return what is kept from message to message; it is saved in checkpoints."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a state."""


class CastCodec(Codec):
    """Round each number to fp16 (relative error 2^-11; at most 65504, where it saturates) or bf16 (2^-8)."""

    def __init__(self, word: str) -> None:
        self.name = word  # type: ignore[misc]
        self.dtype = _16_BITS[word]

    def encode(self, rows: Tensor) -> list[Tensor]:
        top = torch.finfo(self.dtype).max
        return [rows.clamp(-top, top).to(self.dtype).contiguous()]

    def decode(self, parts: Sequence[Tensor], width: int, dtype: torch.dtype) -> Tensor:
        _check_parts(self.name, parts, [(self.dtype, (width,))])
        return parts[0].to(dtype)

    def bytes_per_row(self, width: int, itemsize: int) -> int:
        return 2 * width


class Quantised(Codec):
    """Round each number to a level of its token: q = round(x k / s), k = 2^(bits - 1) - 1, s >= max|x| as sent.

    The error per number is at most s / (2 k): s / 254 with 8 bits, s / 14 with 4. Scales are bf16, rounded up so that
    nothing clips; fp16 would underflow on small gradients.
    """

    def __init__(self, bits: int) -> None:
        self.name = f"int{bits}"  # type: ignore[misc]
        self.bits = bits

    def encode(self, rows: Tensor) -> list[Tensor]:
        """Return codes, uint8 ``[n, ceil(w bits / 8)]``, and scales, bf16 ``[n]``; refuse what is not finite."""
        if not bool(torch.isfinite(rows).all()):
            raise ValueError(
                "the activation or its gradient holds NaN or infinity: lower the learning rate, or leave codecs out"
            )
        n, width = rows.shape
        k = levels(self.bits)
        scale = _rounded_up(rows.abs().amax(1) if width else rows.new_zeros(n))
        s = scale.to(rows.dtype)[:, None]
        codes = ((rows / torch.where(s > 0, s, 1)) * k).round_().add_(k).clamp_(0, 2 * k).to(torch.uint8)
        codes = torch.nn.functional.pad(codes, (0, -width % (8 // self.bits)))
        return [pack_codes(codes.reshape(-1), self.bits).view(n, packed_bytes(width, self.bits)), scale]

    def decode(self, parts: Sequence[Tensor], width: int, dtype: torch.dtype) -> Tensor:
        _check_parts(self.name, parts, [(torch.uint8, (packed_bytes(width, self.bits),)), (torch.bfloat16, ())])
        codes, scales = parts
        n, k, stored = len(codes), levels(self.bits), codes.shape[1] * (8 // self.bits)
        rows = unpack_codes(codes.reshape(-1), n * stored, self.bits).view(n, stored)[:, :width].to(dtype)
        return (rows - k) * (scales.to(dtype) / k)[:, None]

    def bytes_per_row(self, width: int, itemsize: int) -> int:
        return packed_bytes(width, self.bits) + 2


class Delta(Codec):
    """AQ-SGD: quantise the change of a sample's activation since its last visit (Wang et al. 2022, arXiv 2206.01299).

    Both ends keep m[slot] for every sample; Q(x - m) is sent, both add its decoded value to m, the receiver uses m. The
    first visit of a slot is sent as it is, in fp32. A slot is a sample's index in the edge's data set.

    Differences from the paper: the activations are SFT's r numbers per token, so the caches are h / r times smaller
    than the published ones; only real tokens are cached; gradients have separate codecs.
    """

    def __init__(self, bits: int) -> None:
        self.name = f"delta:{bits}"  # type: ignore[misc]
        self._change = Quantised(bits)
        self.cache: dict[int, Tensor] = {}  # equal at both ends after every message

    def encode_visits(self, rows: Sequence[Tensor], slots: Sequence[int]) -> list[Tensor]:
        """Return fresh rows, codes and scales for the samples' rows ``[length, w]``; update the cache."""
        fresh, known = self._sort(slots)
        width = rows[0].shape[1] if rows else 0
        for i in known:
            if self.cache[slots[i]].shape != rows[i].shape:
                raise ValueError(f"sample {slots[i]} changed length: delta needs the same tokens on every visit")
        first = _joined([rows[i].float() for i in fresh], width)
        parts = self._change.encode(_joined([rows[i].float() - self.cache[slots[i]] for i in known], width))
        self._update(slots, fresh, known, [len(row) for row in rows], first, parts, width)
        return [first, *parts]

    def decode_visits(
        self, parts: Sequence[Tensor], slots: Sequence[int], lengths: Sequence[int], width: int
    ) -> Tensor:
        """Return the cached rows of all samples after the update, ``[sum of lengths, w]`` fp32."""
        fresh, known = self._sort(slots)
        if len(parts) != 3:
            raise ValueError(f"the other end sent {len(parts)} parts, codec {self.name!r} expects 3")
        first, codes, scales = parts
        _check_parts(self.name, [first], [(torch.float32, (width,))])
        of_codes = (torch.uint8, (packed_bytes(width, self._change.bits),))
        _check_parts(self.name, [codes, scales], [of_codes, (torch.bfloat16, ())])
        rows_of = [sum(lengths[i] for i in group) for group in (fresh, known)]
        fits = all(self.cache[slots[i]].shape == (lengths[i], width) for i in known)
        if [len(first), len(codes)] != rows_of or not fits:
            raise ValueError(
                f"the caches of {self.name} differ: the other end sent {len(first)} new and {len(codes)} known rows, "
                f"here there are {rows_of[0]} and {rows_of[1]}; restart both ends from a checkpoint"
            )
        self._update(slots, fresh, known, lengths, first, [codes, scales], width)
        return _joined([self.cache[slot] for slot in slots], width)

    def bytes_per_row(self, width: int, itemsize: int) -> int:  # of a known sample's row; a fresh one takes 4 w
        return self._change.bytes_per_row(width, itemsize)

    def state(self) -> dict[str, Any]:
        return {"cache": dict(self.cache)}

    def load_state(self, state: dict[str, Any]) -> None:
        self.cache = dict(state["cache"])

    def _sort(self, slots: Sequence[int]) -> tuple[list[int], list[int]]:
        if len(set(slots)) != len(slots):
            raise ValueError("a sample occurs twice in one batch: delta needs distinct slots")
        fresh = [i for i, slot in enumerate(slots) if slot not in self.cache]
        return fresh, [i for i, slot in enumerate(slots) if slot in self.cache]

    def _update(
        self, slots: Sequence[int], fresh: Sequence[int], known: Sequence[int], lengths: Sequence[int], first: Tensor,
        parts: Sequence[Tensor], width: int,
    ) -> None:  # fmt: skip
        change = self._change.decode(parts, width, torch.float32)
        for i, rows in zip(known, change.split([lengths[i] for i in known])):
            self.cache[slots[i]] = self.cache[slots[i]] + rows
        for i, rows in zip(fresh, first.split([lengths[i] for i in fresh])):
            self.cache[slots[i]] = rows.detach().clone()


class Chain:
    """The codecs of one direction, with their state.

    ``values`` is the value codec; ``packs``: only real tokens are sent.
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
            lengths = [x.shape[1]] * len(x) if visit.lengths is None else visit.lengths
            return self.values.encode_visits([row[:n] for row, n in zip(x, lengths)], list(visit.slots or ()))
        if self.packs:
            return self.values.encode(_real_rows(x, visit.lengths))
        parts = self.values.encode(x.reshape(-1, x.shape[-1]))
        return [part.view(*x.shape[:2], *part.shape[1:]) for part in parts]

    def decode(self, parts: Sequence[Tensor], visit: Visit, width: int, dtype: torch.dtype, length: int = 0) -> Tensor:
        """Return the numbers ``[B, L, width]`` of ``dtype``; padding is zero if only real tokens were sent.

        Args:
            parts, visit: as received, of which batch.
            width, dtype: numbers per token, of the model's type.
            length: L, if only real tokens were sent; 0: that of the longest sample.

        Raises:
            ValueError: the parts are not what this chain sends for such a batch.
        """
        lengths = list(visit.lengths or ())
        if isinstance(self.values, Delta) and visit.training:
            if visit.slots is None or len(visit.slots) != len(lengths) or not lengths:
                raise ValueError("the other end did not send a slot per sample, which delta needs")
            rows = self.values.decode_visits(parts, visit.slots, lengths, width).to(dtype)
            return _spread(rows, lengths, length)
        values = Codec() if isinstance(self.values, Delta) else self.values
        if self.packs:
            rows = values.decode(parts, width, dtype)
            if len(rows) != sum(lengths) or not lengths:
                raise ValueError(f"the other end sent {len(rows)} tokens, but its lengths sum to {sum(lengths)}")
            return _spread(rows, lengths, length)
        if not parts or any(part.dim() < 2 or part.shape[:2] != parts[0].shape[:2] for part in parts):
            raise ValueError("the other end sent parts that are not [B, L, ...]")
        lead = tuple(parts[0].shape[:2])
        rows = values.decode([part.reshape(-1, *part.shape[2:]) for part in parts], width, dtype)
        if visit.lengths is not None and (len(lengths) != lead[0] or max(lengths, default=0) > lead[1]):
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

    def parts(self, training: bool) -> int:
        """Return how many parts a message has."""
        if isinstance(self.values, Delta) and training:
            return 3
        return 2 if isinstance(self.values, Quantised) else 1


def check_chain(words: Sequence[str], direction: str, carries: str | None = None) -> None:
    """Raise ``ValueError`` for an unknown codec or a wrong order.

    ``carries``: "activation" or "gradient"; None: what goes ``direction``, "up" or "down", if the front is at the edge.
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
    if word in _16_BITS:
        return CastCodec(word)
    if word.startswith("int"):
        return Quantised(int(word.removeprefix("int")))
    return Delta(int(word.partition(":")[2]))


def _check_parts(name: str, parts: Sequence[Tensor], wanted: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> None:
    found = [(part.dtype, tuple(part.shape[1:])) for part in parts]
    if found != list(wanted) or len({len(part) for part in parts}) != 1:
        come, due = ([(str(d), s) for d, s in these] for these in (found, wanted))
        raise ValueError(f"the other end sent {come}, codec {name!r} expects {due}")


def _rounded_up(top: Tensor) -> Tensor:
    """Return the smallest bf16 number that is not below ``top``."""
    near = top.to(torch.bfloat16)
    above = torch.nextafter(near, torch.full_like(near, float("inf")))
    return torch.where(near.to(top.dtype) < top, above, near)


def _joined(rows: Sequence[Tensor], width: int) -> Tensor:
    return torch.cat(list(rows)) if rows else torch.zeros(0, width)


def _real_rows(x: Tensor, lengths: Sequence[int] | None) -> Tensor:
    if lengths is None:
        return x.reshape(-1, x.shape[-1])
    return torch.cat([sample[:count] for sample, count in zip(x, lengths)])


def _spread(rows: Tensor, lengths: Sequence[int], length: int) -> Tensor:
    out = rows.new_zeros(len(lengths), length or max(lengths), rows.shape[1])
    for sample, part in zip(out, rows.split(list(lengths))):
        sample[: len(part)] = part
    return out
