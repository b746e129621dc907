"""Data of an edge: token lists with labels, batches with padding on the right, metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.systems.split.batch import Batch
from thinwire.systems.split.models import require


@dataclass(frozen=True)
class TextData:
    """Tokenised samples.

    Attributes:
        tokens: ids per sample, at least one.
        labels: a class (int) or a number (float) per sample.
        pad: id that pads a batch; masked.
        types: token types per sample (second sentence: 1), or None.
        truncated: how many samples were cut to the maximum length.
    """

    tokens: Sequence[Sequence[int]]
    labels: Sequence[int | float]
    pad: int = 0
    types: Sequence[Sequence[int]] | None = None
    truncated: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return these samples as a batch, padded to the longest."""
        lengths = [len(self.tokens[i]) for i in indices]
        inputs = {"input_ids": self._padded(self.tokens, indices, max(lengths), self.pad)}
        if self.types is not None:
            inputs["token_type_ids"] = self._padded(self.types, indices, max(lengths), 0)
        labels = torch.tensor([self.labels[i] for i in indices])
        return Batch(inputs, labels, torch.tensor(lengths), torch.tensor(list(indices)))

    def part(self, indices: Sequence[int]) -> TextData:
        """Return a data set of some of the samples, such as one edge's share."""
        types = None if self.types is None else [self.types[i] for i in indices]
        return TextData([self.tokens[i] for i in indices], [self.labels[i] for i in indices], self.pad, types)

    def _padded(self, rows: Sequence[Sequence[int]], indices: Sequence[int], length: int, fill: int) -> Tensor:
        out = torch.full((len(indices), length), fill)
        for place, i in zip(out, indices):
            place[: len(rows[i])] = torch.tensor(list(rows[i]))
        return out


@dataclass(frozen=True)
class Task:
    """What is to be learned.

    Attributes:
        name: for display.
        train: samples to learn from.
        held_out: samples for the score; never trained on.
        classes: number of outputs.
        vocabulary: number of token ids.
        metric: "accuracy", "matthews" or "spearman".
        describe: one line for display.
    """

    name: str
    train: TextData
    held_out: TextData
    classes: int
    vocabulary: int
    metric: str
    describe: str

    def score(self, logits: Tensor) -> float:
        """Return the metric on the held-out samples, given their logits in order."""
        labels = torch.tensor(list(self.held_out.labels))
        if self.metric == "spearman":
            stats = require("scipy.stats")
            return float(stats.spearmanr(logits.squeeze(-1).numpy(), labels.numpy()).statistic)
        guessed = logits.argmax(-1)
        if self.metric == "matthews":
            metrics = require("sklearn.metrics")
            return float(metrics.matthews_corrcoef(labels.numpy(), guessed.numpy()))
        return float((guessed == labels).double().mean())
