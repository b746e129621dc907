"""What an algorithm is made of: an executor that does a client's work, and an aggregator on the server.

A round is a generator, like every method of thinwire: it yields a :class:`RoundRequest`, which every client of the
cohort answers once with a :class:`ClientResult`, and receives the combined answers, a :class:`Reduced`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from thinwire.systems.federated.data import batches
from thinwire.systems.federated.workspace import Workspace

Loss = Callable[[nn.Module, Any], Tensor]
"""(model, batch) -> the mean loss of the batch, 0-dim."""


@dataclass(frozen=True)
class Operator:
    """How the values that clients return under one name are combined.

    Attributes:
        name: for messages.
        linear: whether a sum of sums gives the same as one sum, so that each device may send a single tensor.
        summed: whether it is computed from such sums; False: every client's value is sent to the server.
    """

    name: str
    linear: bool = True
    summed: bool = True


WEIGHTED_MEAN = Operator("weighted mean")
"""Mean over the clients that answered, weighted by their samples (or equally, see the algorithm's ``weights``)."""
SUM = Operator("sum")
"""Sum over the clients that answered."""
COLLECT = Operator("collect", summed=False)
"""Every client's value, by client id.

It sends one value per client, so it is for small values, and for rules such as the median that need all values.
"""


class NotLinear(ValueError):
    """A rule that is not linear was requested for summed values."""


def check_operators(operators: Mapping[str, Operator]) -> None:
    for name, operator in operators.items():
        if not isinstance(operator, Operator):
            raise ValueError(f"operators[{name!r}] must be WEIGHTED_MEAN, SUM or COLLECT, not {operator!r}")
        if operator.summed and not operator.linear:
            raise NotLinear(
                f"{name!r}: a {operator.name} cannot be made of sums that devices have already added up; use COLLECT, "
                "which sends every client's value, and compute it in program()"
            )


@dataclass(frozen=True)
class RoundRequest:
    """One pass over the cohort: every client gets the payload and answers once.

    Attributes:
        payload: tensors by name, the same for all clients. Not modified.
        name: of the pass, if an algorithm has several.
    """

    payload: Mapping[str, Tensor]
    name: str = "train"


@dataclass(frozen=True)
class Reduced(Mapping[str, Tensor]):
    """The combined answers of a cohort: a mapping from names to tensors.

    Attributes:
        tensors: by name, the summed ones.
        collected: by client, then by name, the others.
        samples, clients: totals over the clients that answered.
        failed: client -> reason why it did not answer.
        metrics: means over the clients that answered, weighted by samples.
    """

    tensors: Mapping[str, Tensor]
    collected: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)
    samples: int = 0
    clients: int = 0
    failed: Mapping[int, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


RoundProgram = Generator[RoundRequest, Reduced, None]


class ServerAggregator(Protocol):
    """The part of an algorithm that runs on the server."""

    operators: Mapping[str, Operator]
    weights: str

    def select(self, round: int, population: int, clients_per_round: int, seed: int) -> Sequence[int]:
        """Return the clients of a round: ascending, each once."""

    def program(self, round: int) -> RoundProgram:
        """Run one round: yield visits, receive their results, change the server's state."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the server's state."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a ``state_dict``."""


def facts_of(algorithm: Any) -> dict[str, Any]:
    """Return an algorithm's name and options as plain data: compared across ranks, saved in checkpoints."""
    names = [f.name for f in dataclasses.fields(algorithm)] if dataclasses.is_dataclass(algorithm) else vars(algorithm)
    values = {name: getattr(algorithm, name) for name in names}
    plain = (int, float, str, bool, type(None))
    options: dict[str, Any] = {name: value for name, value in values.items() if isinstance(value, plain)}
    if inner := getattr(algorithm, "inner", None):
        options["inner"] = facts_of(inner)
    return {"algorithm": type(algorithm).__name__, **options}


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
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
        """The model, with the weights ``x``."""
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
