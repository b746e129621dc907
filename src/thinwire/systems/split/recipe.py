"""How both ends train: one frozen recipe, equal at both, compared by hash before the first step."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from thinwire.core.kernels.seeding import seed_of

LOSSES = ("classification", "regression", "next_token")
IGNORED = -100
"""Label of a token that is ignored, with ``loss="next_token"``."""


@dataclass(frozen=True)
class Recipe:
    """AdamW with linear warm-up and linear decay, as in the published configurations.

    Attributes:
        learning_rate: its peak, at both ends.
        epochs: passes over the edge's data.
        batch_size: samples per step.
        weight_decay: of matrices; vectors (biases, norms) have none.
        eps: of AdamW.
        warmup: share of the steps during which the learning rate rises.
        seed: for the order of samples and for dropout; each half has its own random stream.
        loss: "classification" (cross-entropy), "regression" (squared error of one output), or "next_token".
    """

    learning_rate: float = 2e-5
    epochs: int = 3
    batch_size: int = 32
    weight_decay: float = 0.01
    eps: float = 1e-8
    warmup: float = 0.1
    seed: int = 0
    loss: str = "classification"

    def __post_init__(self) -> None:
        for name in ("learning_rate", "weight_decay", "eps", "warmup"):
            value = float(getattr(self, name))  # NumPy's numbers too: both ends compare them as JSON
            object.__setattr__(self, name, value)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}={value!r} must be finite and not negative")
        for name in ("epochs", "batch_size"):
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ValueError(f"{name}={count!r} must be a whole number of at least 1")
        if self.warmup >= 1:
            raise ValueError(f"warmup={self.warmup!r} must be a share of the steps, such as 0.1")
        if self.loss not in LOSSES:
            raise ValueError(f"loss={self.loss!r} is unknown; use one of {', '.join(LOSSES)}")

    @property
    def hash(self) -> str:
        """A short digest, the same on every machine."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=8).hexdigest()

    def to_json(self) -> str:
        """Return the recipe as JSON text."""
        return json.dumps(asdict(self), sort_keys=True)

    def steps(self, samples: int) -> int:
        """Return the steps of the whole training; the last batch of an epoch may be short."""
        return self.epochs * -(-samples // self.batch_size)

    def batches(self, samples: int, epoch: int) -> list[list[int]]:
        """Return the indices of an epoch's batches, the same on every machine."""
        draw = torch.Generator().manual_seed(seed_of(self.seed, "order", epoch))
        order = torch.randperm(samples, generator=draw).tolist()
        return [order[i : i + self.batch_size] for i in range(0, samples, self.batch_size)]

    def optimizer(self, half: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW for one half."""
        trained = [p for p in half.parameters() if p.requires_grad]
        matrices = [p for p in trained if p.dim() > 1]
        vectors = [p for p in trained if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": self.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW([g for g in groups if g["params"]], lr=self.learning_rate, eps=self.eps)

    def set_rate(self, optimizer: torch.optim.Optimizer, step: int, total: int) -> None:
        """Set the learning rate of a step (from 0) of ``total``."""
        warm = round(self.warmup * total)
        share = (step + 1) / warm if step < warm else (total - step) / max(1, total - warm)
        for group in optimizer.param_groups:
            group["lr"] = self.learning_rate * share

    @property
    def loss_function(self) -> Callable[[Tensor, Tensor], Tensor]:
        """The function (logits, labels) -> mean loss."""
        return _LOSS_FUNCTIONS[self.loss]


def _classification(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, labels.long())


def _regression(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.mse_loss(logits.squeeze(-1), labels.to(logits.dtype))


def _next_token(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten().long(), ignore_index=IGNORED
    )


_LOSS_FUNCTIONS = {"classification": _classification, "regression": _regression, "next_token": _next_token}
