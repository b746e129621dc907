"""What algorithms share: local SGD on the flat vector of parameters, and the server's state."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.core.checks import check_choice, check_count, check_number
from thinwire.systems.federated.aggregator import ClientContext, ClientResult, Operator, RoundProgram
from thinwire.systems.federated.data import sample
from thinwire.systems.federated.private import opacus, private_gradients

Tensors = Mapping[str, Tensor]
Adjust = Callable[[Tensor, Tensor], None]
"""(gradient, x): modify the gradient [D] in place before the step."""


@dataclass(frozen=True)
class LocalResult:
    """The result of local SGD."""

    x: Tensor  # the weights, [D]; this is the model's own memory, so copy what you keep
    steps: int  # how many were made
    lr: float  # their learning rate


@dataclass(kw_only=True)
class Algorithm(abc.ABC):
    """An executor and an aggregator in one object: ``train`` runs for every client, ``program`` once a round.

    ``self`` belongs to the server: ``train`` only reads options from it, and stores nothing on it.

    Args:
        lr: learning rate of the local steps.
        lr_decay: factor applied to ``lr`` after every round.
        epochs: passes over a client's samples.
        batch_size: of the local steps; None: all samples of the client.
        max_steps: most local steps of a client; None: as many as its epochs have.
        momentum, weight_decay: of the local steps, as in ``torch.optim.SGD``.
        max_grad_norm: limit of the norm of each local gradient; None: none.
        noise_multiplier: DP-SGD: ``max_grad_norm`` limits the gradient of each *sample*, and the noise on their sum is
            this many times the limit; see :mod:`~thinwire.federated.private`. None: plain SGD.
        server_lr: learning rate of the server's step.
        weights: how a client is weighted in means: "samples" or "uniform".

    Attributes:
        theta: the server's weights, ``[D]``.
        operators: how the values returned by clients are combined.
        stateful: whether clients keep a state.
        server_state: names of the server's tensors, which checkpoints hold.
        compressible: names under ``reduce`` that may be compressed: changes, not weights, and only those from which
            nothing else is derived.
    """

    operators: ClassVar[Mapping[str, Operator]] = {}
    stateful: ClassVar[bool] = False
    server_state: ClassVar[tuple[str, ...]] = ("theta",)
    compressible: ClassVar[frozenset[str]] = frozenset()

    lr: float = 0.1
    lr_decay: float = 1.0
    epochs: int = 1
    batch_size: int | None = 32
    max_steps: int | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0
    max_grad_norm: float | None = None
    noise_multiplier: float | None = None
    server_lr: float = 1.0
    weights: str = "samples"

    def __post_init__(self) -> None:
        for name in ("lr", "lr_decay", "server_lr", "max_grad_norm", "noise_multiplier"):
            if (rate := getattr(self, name)) is not None:
                check_number(name, rate, above=0)
        for name in ("batch_size", "max_steps", "epochs"):
            if (count := getattr(self, name)) is not None:
                check_count(name, count)
        check_below_1("momentum", self.momentum)
        check_number("weight_decay", self.weight_decay, least=0)
        if self.noise_multiplier is not None and self.max_grad_norm is None:
            raise ValueError("noise_multiplier= is in units of max_grad_norm=: give both")
        check_choice("weights", self.weights, ("samples", "uniform"))

    def setup(self, theta: Tensor, population: int, clients_per_round: int) -> None:
        """Begin a run with these weights ``[D]``. The server's other tensors start at zero."""
        if self.noise_multiplier is not None:
            opacus()
        self.theta = theta
        self.population = population
        for name in self.server_state:
            if name != "theta":
                setattr(self, name, torch.zeros_like(theta))

    def select(self, round: int, population: int, clients_per_round: int, seed: int) -> Sequence[int]:
        """Return the clients of a round: uniform, without replacement."""
        return sample(seed, round, population, clients_per_round)

    @abc.abstractmethod
    def program(self, round: int) -> RoundProgram:
        """Run one round on the server."""

    @abc.abstractmethod
    def train(self, context: ClientContext, payload: Tensors, state: Tensors | None) -> ClientResult:
        """Do one client's work."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the server's tensors by name."""
        return {name: getattr(self, name) for name in self.server_state}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a ``state_dict``.

        Raises:
            ValueError: a tensor is missing or has another shape.
        """
        for name in self.server_state:
            if name not in state or state[name].shape != getattr(self, name).shape:
                raise ValueError(f"the state contains no {name!r} of shape {tuple(getattr(self, name).shape)}")
            setattr(self, name, state[name].clone())

    def shape_of(self, name: str) -> Sequence[int]:
        """Return the required shape of what clients return under a summed name; by default that of theta."""
        return tuple(self.theta.shape)

    @property
    def visits(self) -> int:
        """Number of visits in a round."""
        return 1

    def rate(self, round: int) -> float:
        """Return the local learning rate of a round."""
        return self.lr * self.lr_decay**round

    def local_sgd(self, context: ClientContext, theta: Tensor, adjust: Adjust | None = None) -> LocalResult:
        """Run plain SGD, with momentum and decay if set, from ``theta`` on the client's samples.

        Args:
            context: the client.
            theta: ``[D]``, not modified.
            adjust: the algorithm's change to each gradient (after clipping, before momentum).
        """
        x, lr, steps = context.x, self.rate(context.round), 0
        x.copy_(theta)
        velocity = torch.zeros_like(x) if self.momentum else None
        for g in self._gradients(context):
            with torch.no_grad():
                if self.weight_decay:
                    g.add_(x, alpha=self.weight_decay)
                if adjust is not None:
                    adjust(g, x)
                x.add_(g if velocity is None else velocity.mul_(self.momentum).add_(g), alpha=-lr)
            steps += 1
        return LocalResult(x, steps, lr)

    def _gradients(self, context: ClientContext) -> Iterator[Tensor]:
        if self.noise_multiplier is not None:
            yield from private_gradients(self, context)
            return
        for batch in context.steps(self.epochs, self.batch_size, self.max_steps):
            g = context.gradient(batch)
            if self.max_grad_norm is not None:
                g.mul_((self.max_grad_norm / (torch.linalg.vector_norm(g) + 1e-6)).clamp(max=1.0))
            yield g


def check_below_1(name: str, value: float) -> None:
    """Raise ``ValueError`` unless an option is at least 0 and below 1."""
    if not 0 <= value < 1:
        raise ValueError(f"{name}={value} must be at least 0 and below 1")
