"""AQ-SGD: quantise the change of a sample's activation since its last visit (Wang et al. 2022, arXiv 2206.01299)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.core.kernels.quantise import packed_bytes
from thinwire.systems.split.codecs.base import Codec, check_parts
from thinwire.systems.split.codecs.quantised import dequantise, quantise


class Delta(Codec):
    """Both ends keep m[slot] for every sample; Q(x - m) is sent, both add its decoded value to m, the receiver uses m.

    The first visit of a slot is sent as it is, in fp32. A slot is a sample's index in the edge's data set.

    Differences from the paper: the activations are SFT's r numbers per token, so the caches are h / r times smaller
    than the published ones; only real tokens are cached; gradients have separate codecs.
    """

    def __init__(self, bits: int) -> None:
        self.name = f"delta:{bits}"  # type: ignore[misc]
        self.bits = bits
        self.cache: dict[int, Tensor] = {}

    def encode_visits(self, rows: Sequence[Tensor], slots: Sequence[int]) -> list[Tensor]:
        """Return fresh rows, codes and scales for the samples' rows ``[length, w]``; update the cache."""
        fresh, known = self._sort(slots)
        width = rows[0].shape[1] if rows else 0
        first = _joined([rows[i].float() for i in fresh], width)
        for i in known:
            if self.cache[slots[i]].shape != rows[i].shape:
                raise ValueError(f"sample {slots[i]} changed length: delta needs the same tokens on every visit")
        change = _joined([rows[i].float() - self.cache[slots[i]] for i in known], width)
        codes, scales = quantise(change, self.bits)
        self._update(slots, fresh, known, [len(row) for row in rows], first, codes, scales, width)
        return [first, codes, scales]

    def decode_visits(
        self, parts: Sequence[Tensor], slots: Sequence[int], lengths: Sequence[int], width: int
    ) -> Tensor:
        """Return the cached rows of all samples after the update, ``[sum of lengths, w]`` fp32.

        Raises:
            ValueError: the parts do not match the cache.
        """
        fresh, known = self._sort(slots)
        if len(parts) != 3:
            raise ValueError(f"the other end sent {len(parts)} parts, codec {self.name!r} expects 3")
        first, codes, scales = parts
        check_parts(self.name, [first], [(torch.float32, (width,))])
        wanted = [(torch.uint8, (packed_bytes(width, self.bits),)), (torch.bfloat16, ())]
        check_parts(self.name, [codes, scales], wanted)
        rows_of = [sum(lengths[i] for i in group) for group in (fresh, known)]
        fits = all(self.cache[slots[i]].shape == (lengths[i], width) for i in known)
        if [len(first), len(codes)] != rows_of or not fits:
            raise ValueError(
                f"the caches of {self.name} differ: the other end sent {len(first)} new and {len(codes)} known rows, "
                f"here there are {rows_of[0]} and {rows_of[1]}; restart both ends from a checkpoint"
            )
        self._update(slots, fresh, known, lengths, first, codes, scales, width)
        return _joined([self.cache[slot] for slot in slots], width)

    def bytes_per_row(self, width: int, itemsize: int) -> int:
        """Return the bytes of a known sample's row; a fresh row takes 4 w."""
        return packed_bytes(width, self.bits) + 2

    def state(self) -> dict[str, Any]:
        """The cache."""
        return {"cache": dict(self.cache)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a cache."""
        self.cache = dict(state["cache"])

    @property
    def digest(self) -> str:
        """A hash of the cache, equal at both ends after every message."""
        made = hashlib.blake2b(digest_size=8)
        for slot in sorted(self.cache):
            made.update(str(slot).encode() + self.cache[slot].cpu().contiguous().numpy().tobytes())
        return made.hexdigest()

    def _sort(self, slots: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the batch positions of first visits, and of the others."""
        if len(set(slots)) != len(slots):
            raise ValueError("a sample occurs twice in one batch: delta needs distinct slots")
        fresh = [i for i, slot in enumerate(slots) if slot not in self.cache]
        return fresh, [i for i, slot in enumerate(slots) if slot in self.cache]

    def _update(
        self,
        slots: Sequence[int],
        fresh: Sequence[int],
        known: Sequence[int],
        lengths: Sequence[int],
        first: Tensor,
        codes: Tensor,
        scales: Tensor,
        width: int,
    ) -> None:
        """Update the cache with the same arithmetic at both ends."""
        change = dequantise(codes, scales, width, self.bits, torch.float32)
        for i, rows in zip(known, change.split([lengths[i] for i in known])):
            self.cache[slots[i]] = self.cache[slots[i]] + rows
        for i, rows in zip(fresh, first.split([lengths[i] for i in fresh])):
            self.cache[slots[i]] = rows.detach().clone()


def _joined(rows: Sequence[Tensor], width: int) -> Tensor:
    return torch.cat(list(rows)) if rows else torch.zeros(0, width)
