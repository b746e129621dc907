"""What both ends must have in common: where a model is cut and what is sent, and how it is trained.

Both are frozen, stored with the halves, and compared by hash before the first step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from thinwire.core.checks import check_choice, check_count, check_number
from thinwire.core.kernels.seeding import seed_of
from thinwire.core.records import Record
from thinwire.systems.split.codecs import Chain, check_chain

IGNORED = -100
"""Label of a token that is ignored, with ``loss="next_token"``."""


@dataclass(frozen=True)
class SplitPlan(Record):
    """Where a model is cut in two, and in what form the activation is sent.

    Attributes:
        cut: the layer that is cut, counted from 1; the edge runs what comes before.
        kind: "lowrank": its first dense layer is split into two thin ones; r numbers per token are sent (SFT). "ffn":
            the cut is between that dense layer and its activation; f numbers are sent. "boundary": the cut is after the
            layer; h numbers are sent. "principal": the cut is after the layer, which keeps every residual; only the r
            principal directions of what it computes are sent, rotated, and its mean stands for the rest.
        rank: r of "lowrank" and "principal".
        residual: of the feed-forward block that is cut. "drop": omitted, as in the paper. "keep": its h numbers are
            sent too. "lowrank:q": only their q principal directions are sent. A "boundary" has no residual to drop.
        labels: who computes the loss: "edge" (labels stay there) or "cloud" (labels are sent; one round trip per step).
        init: of the thin factors. "svd": closest to the weight. "activation": closest to its output on sample batches.
        up: codecs for what goes up, such as ("int8", "pack"): the activation if the front is at the edge.
        down: codecs for what comes down: the activation's gradient if the front is at the edge.
        front_on: who runs the first layers: "edge", or "cloud" as in the published code. With "cloud" the edge has the
            back and the labels, sends its inputs (token ids) every step, and the activation comes down.
    """

    called: ClassVar[str] = "a split plan"

    cut: int
    kind: str = "lowrank"
    rank: int = 8
    residual: str = "drop"
    labels: str = "edge"
    init: str = "svd"
    up: tuple[str, ...] = ()
    down: tuple[str, ...] = ()
    front_on: str = "edge"

    def __post_init__(self) -> None:
        object.__setattr__(self, "up", tuple(self.up))
        object.__setattr__(self, "down", tuple(self.down))
        check_choice("kind", self.kind, ("lowrank", "principal", "ffn", "boundary"))
        check_choice("init", self.init, ("svd", "activation"))
        for name in ("labels", "front_on"):
            check_choice(name, getattr(self, name), ("edge", "cloud"))
        for name in ("cut", "rank"):
            check_count(name, getattr(self, name))
        if self.residual not in ("drop", "keep") and self.kept_directions < 1:
            raise ValueError(f"residual={self.residual!r} is unknown; use drop, keep or a rank such as lowrank:4")
        if self.whole_layers and self.residual != "drop":
            raise ValueError(f"a {self.kind} cut always keeps every residual: leave residual out")
        if self.kind != "lowrank" and self.init != "svd":
            raise ValueError(f"init={self.init!r} needs factors: use it with kind='lowrank'")
        if self.front_on == "cloud" and self.labels == "cloud":
            raise ValueError(
                "labels='cloud' cannot be used with front_on='cloud': the edge has the back, which computes the loss; "
                "leave labels out"
            )
        for direction in ("up", "down"):
            check_chain(getattr(self, direction), direction, self.carries(direction))

    @property
    def kept_directions(self) -> int:
        """r of "principal", q of ``residual="lowrank:q"``; 0 for "drop" and "keep", -1 for anything else."""
        if self.kind == "principal":
            return self.rank
        word, colon, count = self.residual.partition(":")
        if not colon:
            return 0 if word in ("drop", "keep") else -1
        return int(count) if word == "lowrank" and count.isascii() and count.isdigit() else -1

    @property
    def whole_layers(self) -> bool:
        """Whether the cut is between two layers, not inside of one."""
        return self.kind in ("boundary", "principal")

    @property
    def calibrated(self) -> bool:
        """Whether the surgery needs sample batches."""
        return self.init == "activation" or self.kept_directions > 0

    def carries(self, direction: str) -> str:
        """Return what goes "up" or comes "down": "activation" or "gradient"."""
        return "activation" if (direction == "up") == (self.front_on == "edge") else "gradient"

    def chain(self, direction: str) -> Chain:
        """Return the codecs of "up" or "down", without state yet."""
        return Chain(self.up if direction == "up" else self.down, direction, self.carries(direction))

    @property
    def leaves(self) -> str | None:
        """A sentence about what data leaves the edge besides activations; None: nothing."""
        if self.front_on == "cloud":
            return "front_on='cloud': the inputs (token ids) leave the edge, every step"
        return "labels='cloud': the labels leave the edge" if self.labels == "cloud" else None

    def width(self, hidden: int, intermediate: int) -> int:
        """Return how many numbers per token are sent, for a model of these widths."""
        main = {"lowrank": self.rank, "principal": 0, "ffn": intermediate, "boundary": hidden}[self.kind]
        return main + (hidden if self.residual == "keep" else self.kept_directions)

    def check(self, layers: int, hidden: int) -> None:
        """Raise ``ValueError`` if a model with that many layers of this width cannot be cut by this plan."""
        if self.cut > layers:
            raise ValueError(f"cut={self.cut} is outside 1 to {layers}, the layers of this model")
        if self.kind in ("lowrank", "principal") and self.rank > hidden:
            raise ValueError(f"rank={self.rank} is outside 1 to {hidden}, the width of this model")
        if self.kept_directions > hidden:
            raise ValueError(f"residual={self.residual!r} keeps more directions than the {hidden} of this model")


@dataclass(frozen=True)
class Recipe(Record):
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

    called: ClassVar[str] = "a training recipe"

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
            object.__setattr__(self, name, check_number(name, value, least=0))
        for name in ("epochs", "batch_size"):
            check_count(name, getattr(self, name))
        if self.warmup >= 1:
            raise ValueError(f"warmup={self.warmup!r} must be a share of the steps, such as 0.1")
        check_choice("loss", self.loss, _LOSSES)

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
        return _LOSSES[self.loss]


def _next_token(logits: Tensor, labels: Tensor) -> Tensor:
    wanted = labels[:, 1:].flatten().long()
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), wanted, ignore_index=IGNORED)


_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "classification": lambda logits, labels: nn.functional.cross_entropy(logits, labels.long()),
    "regression": lambda logits, labels: nn.functional.mse_loss(logits.squeeze(-1), labels.to(logits.dtype)),
    "next_token": _next_token,
}
