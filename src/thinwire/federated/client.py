"""The client's side of an algorithm: what it is given, what it answers, and the executor that does the work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from thinwire.federated.data import batches
from thinwire.federated.workspace import Workspace

Loss = Callable[[nn.Module, Any], Tensor]
"""(model, batch) -> the mean loss of the batch, 0-dim."""


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    """The default loss: batches are ``(inputs, class numbers)``."""
    inputs, classes = batch
    return nn.functional.cross_entropy(model(inputs), classes)


@dataclass
class ClientContext:
    """All that one client's work may depend on. Made afresh for every client: nothing of the one before is left.

    Attributes:
        client: its id. samples: how many it has. round, visit: what it takes part in.
        seed: of everything random here; torch's, numpy's and Python's generators have been seeded with it.
        device: where the model is.
        data: what ``clients.load`` returned, on the device if it is tensors.
        workspace: the model, with the payload's weights loaded where the algorithm does so.
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
        """The model's trainable parameters, ``[D]``: edit it, and the model has changed."""
        return self.workspace.x

    def steps(self, epochs: int = 1, batch_size: int | None = None, limit: int | None = None) -> Iterator[Any]:
        """Batches in an order that the seed fixes.

        Args:
            epochs: passes over the data; each in an order of its own.
            batch_size: the last batch of an epoch may be smaller; None: all samples in one.
            limit: of batches in all.
        """
        return batches(self.data, epochs, batch_size, limit, self.seed)

    def gradient(self, batch: Any) -> Tensor:
        """The gradient ``[D]`` of the batch's loss at ``x``. Overwritten by the next call; may be edited."""
        loss = self.loss(self.workspace.model, batch)
        self._losses.append(loss.detach())
        return self.workspace.gradient(loss)

    def mean_loss(self) -> float | None:
        """Mean over the batches so far; None before the first."""
        return float(torch.stack(self._losses).mean()) if self._losses else None


@dataclass
class ClientResult:
    """A client's answer.

    Attributes:
        reduce: tensors by name, for the operators that sum. They are read at once and may be reused afterwards.
        collect: small tensors by name, for ``COLLECT``.
        state: what this client wants to find next time; None: it keeps what it had.
        samples: its weight; None: what ``clients.samples`` says.
        metrics: numbers for the table; the mean loss is added by itself.
        sent_bytes: what this client alone would send, where that is less than its tensors (compression).
    """

    reduce: Mapping[str, Tensor] = field(default_factory=dict)
    collect: Mapping[str, Tensor] = field(default_factory=dict)
    state: Mapping[str, Tensor] | None = None
    samples: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    sent_bytes: int | None = None


class ClientExecutor(Protocol):
    """What runs on a device, for one client after another."""

    def train(
        self, context: ClientContext, payload: Mapping[str, Tensor], state: Mapping[str, Tensor] | None
    ) -> ClientResult:
        """One client's work. It may not keep anything on ``self``: the next call is another client's.

        Args:
            context: the client, its data, the model.
            payload: what the server sent. Not to be edited.
            state: what this client returned last time; None the first time. Not to be edited.
        """
