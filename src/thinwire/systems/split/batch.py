"""A batch at the edge: inputs, labels, real lengths, and which samples they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.systems.split.codecs import Visit


@dataclass(frozen=True)
class Batch:
    """Samples of the edge's data.

    Attributes:
        inputs: by the names of the model's embedding inputs: ``input_ids`` [B, L], ``pixel_values`` [B, C, H, W].
        labels: ``[B]`` (``[B, L]`` with ``loss="next_token"``).
        lengths: real tokens per sample, int64 ``[B]``; padding is on the right. None: no padding.
        slots: the samples' indices in the data set, ``[B]``.
    """

    inputs: Mapping[str, Tensor]
    labels: Tensor
    lengths: Tensor | None
    slots: Tensor

    def __post_init__(self) -> None:
        if self.lengths is None:
            return
        length = next(iter(self.inputs.values())).shape[1]
        if len(self.lengths) != len(self.labels) or int(self.lengths.min()) < 1 or int(self.lengths.max()) > length:
            raise ValueError(f"lengths must be {len(self.labels)} numbers from 1 to {length}, the length of the batch")
        if length >= 1 << 16:
            raise ValueError(f"sequences of {length} tokens are too long: lengths travel in 16 bits")

    def visit(self, training: bool) -> Visit:
        """Return what the codecs need to know about the batch."""
        lengths = None if self.lengths is None else self.lengths.tolist()
        return Visit(lengths, self.slots.tolist(), training)

    def to(self, device: torch.device) -> Batch:
        inputs = {name: tensor.to(device) for name, tensor in self.inputs.items()}
        return Batch(inputs, self.labels.to(device), self.lengths, self.slots)
