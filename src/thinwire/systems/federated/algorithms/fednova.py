"""FedNova: FedAvg in which clients that make more local steps do not count more.

Paper: Wang et al.: Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, NeurIPS 2020,
equation 8 and Table 1.

Client: delta / a, where a is the L1 norm of the weights with which its gradients enter delta: tau for tau plain steps;
with momentum r, (tau - r (1 - r^tau) / (1 - r)) / (1 - r); with FedProx's term, (1 - (1 - lr mu)^tau) / (lr mu).
Server: theta += server_lr * mean(a) * mean(delta / a). With equal step counts it is FedAvg.

Differences from the paper: momentum and FedProx's term cannot be combined (refused); the server's own momentum is left
out. The authors' code (JYWa/FedNova) scales the step by the mean number of local steps if mu > 0 and by mean(a)
otherwise; here it is always mean(a), so that with equal step counts FedNova with mu is FedProx with mu: at lr 0.3, mu
0.5 and 6 steps the factor is 4.15 here and 6 there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from thinwire.systems.federated.aggregator import WEIGHTED_MEAN, Operator, RoundProgram, RoundRequest
from thinwire.systems.federated.algorithms.base import Algorithm, positive, proximal
from thinwire.systems.federated.client import ClientContext, ClientResult


@dataclass(kw_only=True)
class FedNova(Algorithm):
    """Normalised averaging.

    Args:
        mu: weight of a proximal term as in FedProx; 0: none.
    """

    operators: ClassVar[Mapping[str, Operator]] = {"direction": WEIGHTED_MEAN, "a": WEIGHTED_MEAN}
    compressible: ClassVar[frozenset[str]] = frozenset({"direction"})

    mu: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("mu", self.mu, zero=True)
        if self.mu and self.momentum:
            raise ValueError("FedNova has no norm for momentum and mu together: leave one of them out")

    def shape_of(self, name: str) -> Sequence[int]:
        """Return the shape; ``a`` is one number."""
        return (1,) if name == "a" else super().shape_of(name)

    def norm(self, steps: int, lr: float) -> float:
        """Return the L1 norm of the weights with which ``steps`` gradients enter the change."""
        r = self.momentum
        if r:
            return (steps - r * (1 - r**steps) / (1 - r)) / (1 - r)
        if self.mu:
            return (1 - (1 - lr * self.mu) ** steps) / (lr * self.mu)
        return float(steps)

    def program(self, round: int) -> RoundProgram:
        """Make one visit and one step."""
        mean = yield RoundRequest({"theta": self.theta})
        self.theta = self.theta + self.server_lr * mean["a"] * mean["direction"]

    def train(
        self, context: ClientContext, payload: Mapping[str, Tensor], state: Mapping[str, Tensor] | None
    ) -> ClientResult:
        """Run local SGD, and normalise the change."""
        theta = payload["theta"]
        local = self.local_sgd(context, theta, proximal(self.mu, theta))
        a = self.norm(local.steps, local.lr)
        return ClientResult({"direction": (local.x - theta) / a, "a": theta.new_tensor([a])})
