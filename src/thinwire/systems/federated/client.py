"""The client's side of an algorithm: what it gets, what it answers, and the executor that does the work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from thinwire.systems.federated.data import batches
from thinwire.systems.federated.workspace import Workspace

Loss = Callable[[nn.Module, Any], Tensor]
"""(model, batch) -> the mean loss of the batch, 0-dim."""


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    """Return the default loss: cross-entropy for batches ``(inputs, class numbers)``."""
    inputs, classes = batch
    return nn.functional.cross_entropy(model(inputs), classes)


@dataclass
class ClientContext:
    """Everything that one client's work may depend on. Created anew for every client.

    Attributes:
        client: its id. samples: how many it has. round, visit: in which it takes part.
        seed: for everything random here; the generators of torch, numpy and Python have been seeded with it.
        device: where the model is.
        data: what ``clients.load`` returned, moved to the device if it consists of tensors.
        workspace: holds the model, with the payload's ``theta`` loaded if there is one.
        loss: (model, batch) -> Tensor.
    """

    client: int
    samples: int
    round: int
    visit: str
    seed: int
    device: torch.device
    data: Any
    workspace: Workspace
    loss: Loss
    _losses: list[Tensor] = field(default_factory=list)

    @property
    def model(self) -> nn.Module:
        return self.workspace.model

    @property
    def x(self) -> Tensor:
        """The model's trainable parameters, ``[D]``: a change of this tensor changes the model."""
        return self.workspace.x

    def steps(self, epochs: int = 1, batch_size: int | None = None, limit: int | None = None) -> Iterator[Any]:
        """Yield batches in an order determined by the seed.

        Args:
            epochs: passes over the data, each in a different order.
            batch_size: the last batch of an epoch may be smaller; None: all samples in one batch.
            limit: most batches in total.
        """
        return batches(self.data, epochs, batch_size, limit, self.seed)

    def gradient(self, batch: Any) -> Tensor:
        """Return the gradient ``[D]`` of the batch's loss at ``x``. May be modified; the next call overwrites it."""
        loss = self.loss(self.workspace.model, batch)
        self._losses.append(loss.detach())
        return self.workspace.gradient(loss)

    def mean_loss(self) -> float | None:
        """Return the mean over the batches so far; None before the first."""
        return float(torch.stack(self._losses).mean()) if self._losses else None


@dataclass
class ClientResult:
    """A client's answer.

    Attributes:
        reduce: tensors by name, for operators that sum. They are read at once and may be reused afterwards.
        collect: small tensors by name, for ``COLLECT``.
        state: passed to this client next time; None: its state stays as it was.
        samples: its weight; None: what ``clients.samples`` returns.
        metrics: numbers for the table; the mean loss is added automatically.
        sent_bytes: what this client alone would send, if less than its tensors (compression).
    """

    reduce: Mapping[str, Tensor] = field(default_factory=dict)
    collect: Mapping[str, Tensor] = field(default_factory=dict)
    state: Mapping[str, Tensor] | None = None
    samples: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    sent_bytes: int | None = None


class ClientExecutor(Protocol):
    """The part of an algorithm that runs on a device, for one client after another."""

    def train(
        self, context: ClientContext, payload: Mapping[str, Tensor], state: Mapping[str, Tensor] | None
    ) -> ClientResult:
        """Do one client's work. It must not store anything on ``self``: the next call is for another client.

        Args:
            context: the client, its data, the model.
            payload: what the server sent. Must not be modified.
            state: what this client returned last time; None the first time. Must not be modified.
        """
