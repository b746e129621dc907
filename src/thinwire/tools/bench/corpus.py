"""Real text without a download: the source of Python's standard library, split into batches by (step, rank)."""

from __future__ import annotations

import os
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 256
_SKIPPED = {"__pycache__", "test", "tests", "site-packages", "dist-packages", "idlelib", "lib-dynload"}
_LEAST = 200_000


@dataclass(frozen=True)
class Corpus:
    """Text bytes, as uint8 tensors."""

    train: Tensor
    validation: Tensor

    def batch(
        self, size: int, length: int, *, step: int, rank: int, validation: bool = False, shares: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Return inputs and next characters, ``(size, length)`` int64 each; the same arguments give the same batch.

        With ``shares`` the text is cut into that many pieces, and the batch is taken from this rank's piece.
        """
        text = self.validation if validation else self.train
        text = text.tensor_split(shares)[rank % shares]
        generator = torch.Generator().manual_seed(step * 1_000_003 + rank * 7919 + (1 << 40) * validation)
        starts = torch.randint(text.numel() - length - 1, (size,), generator=generator)
        windows = text[starts[:, None] + torch.arange(length + 1)].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


@lru_cache(maxsize=2)
def standard_library(most_bytes: int = 4_000_000, validation_share: float = 0.1) -> Corpus:
    """Return the sources of the standard library in sorted order, at most ``most_bytes``; the end is held out.

    Raises:
        ValueError: this Python was installed without its sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED)
        for name in sorted(files):
            if name.endswith(".py") and len(text) < most_bytes:
                text += (Path(folder) / name).read_bytes()
        if len(text) >= most_bytes:
            break
    if len(text) < _LEAST:
        raise ValueError(
            f"this Python has no sources of its standard library under {root}; use --model mlp or resnet18"
        )
    everything = torch.frombuffer(text[:most_bytes], dtype=torch.uint8).clone()
    cut = int(everything.numel() * (1 - validation_share))
    return Corpus(everything[:cut], everything[cut:])
