"""Everything that defines a run in one object, so that one user function serves both simulation and deployment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from thinwire.systems.federated.client import Loss, cross_entropy
from thinwire.systems.federated.data import ClientData
from thinwire.systems.federated.history import History
from thinwire.systems.federated.simulate import simulate
from thinwire.systems.federated.workspace import Evaluate


@dataclass
class Federation:
    """What ``build()`` returns to ``thinwire federated run`` and ``serve``.

    Attributes:
        algorithm: an executor and aggregator.
        model: with the initial weights.
        clients: the population.
        rounds, clients_per_round, seed, reduction: as for :func:`~thinwire.federated.simulate`.
        loss, evaluate, evaluate_every: likewise.
        per_client: an ``evaluate`` for ``thinwire federated run --per-client``, called in addition to the other: see
            :func:`~thinwire.federated.over_clients`.
        chance: what guessing reaches, by the names of the numbers that ``evaluate`` returns: a line in pictures.
        options: more arguments for ``simulate``.
    """

    algorithm: Any
    model: nn.Module
    clients: ClientData
    rounds: int = 10
    clients_per_round: int = 10
    loss: Loss = cross_entropy
    evaluate: Evaluate | None = None
    evaluate_every: int | None = None
    per_client: Evaluate | None = None
    chance: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    reduction: str = "fp64"
    options: Mapping[str, Any] = field(default_factory=dict)

    def simulate(self, **changes: Any) -> History:
        """Run it in this process; ``changes`` override its own values."""
        named = ("rounds", "clients_per_round", "loss", "evaluate", "evaluate_every", "seed", "reduction")
        arguments = {**{name: getattr(self, name) for name in named}, **self.options, **changes}
        return simulate(self.algorithm, self.model, self.clients, **arguments)


def check_federation(made: Any, name: str) -> Federation:
    """Raise ``ValueError`` unless a user's function has returned a ``Federation``."""
    if not isinstance(made, Federation):
        raise ValueError(f"{name} must return a thinwire.systems.federated.Federation, not {type(made).__name__}")
    return made


Build = Callable[[], Federation]
