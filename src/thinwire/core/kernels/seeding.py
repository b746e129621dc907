"""Random draws, equal on all ranks and in resumed runs: seeds are derived from words, not from a counter."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor


def upload(x: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a host tensor on ``device``; to CUDA in the current stream's order, without waiting."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def seed_of(*words: object) -> int:
    """Return the seed for some words: the first 8 bytes of ``blake2b("word:word:...")``, without the sign bit.

    Example:
        >>> seed_of(0, "layer.weight") == seed_of("0:layer.weight")
        True
    """
    text = ":".join(str(word) for word in words)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & (2**63 - 1)


def generator(*words: object) -> torch.Generator:
    """Return a CPU generator seeded by words, for example ``generator(seed, name)``."""
    return torch.Generator().manual_seed(seed_of(*words))


def normal(rows: int, columns: int, *words: object, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a standard normal matrix, drawn on the CPU in fp32 for any ``dtype`` and ``device``; on meta, no draw."""
    if device.type == "meta":
        return torch.empty(rows, columns, dtype=dtype, device=device)
    return upload(torch.randn(rows, columns, generator=generator(*words)), device).to(dtype)


def noise(n: int, *words: object, device: torch.device) -> Tensor:
    """Return ``n`` int16 numbers, uniform over all of int16, for stochastic rounding; CUDA and CPU draw different ones.

    Four come from one 64-bit draw, because draws take most of a quantiser's time on a CPU.
    """
    if device.type == "meta":
        return torch.empty(n, dtype=torch.int16, device=device)
    out = torch.empty(n + -n % 4, dtype=torch.int16, device=device)
    fill_noise([out], [words])
    return out[:n]


def fill_noise(parts: Sequence[Tensor], words: Sequence[Sequence[object]]) -> None:
    """Fill int16 tensors, whose sizes are multiples of 4, each with the ``noise`` of its words."""
    device = parts[0].device
    draw = on_card(device) if device.type == "cuda" else torch.Generator(device)
    for part, said in zip(parts, words):
        part.view(torch.int64).random_(-(2**63), None, generator=draw.manual_seed(seed_of(*said)))


@cache
def on_card(device: torch.device) -> torch.Generator:
    """Return one generator for all draws on a CUDA device: once launched, a draw has read its seed."""
    return torch.Generator(device)
