"""SCAFFOLD: local gradients corrected by the usual difference between the client's gradient and the mean.

Paper: Karimireddy et al.: SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020, Algorithm 1,
option II.

Client i keeps c_i. Step: x -= lr (g - c_i + c); then c_i' = c_i - c + (theta - x) / (steps lr).
Server: theta += server_lr * mean(x - theta), uniform; c += sum(c_i' - c_i) / M, M the whole population.

Differences from the paper: ``weights="samples"`` may weight the mean of x (c stays uniform).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.systems.federated.aggregator import SUM, WEIGHTED_MEAN, Operator, RoundProgram, RoundRequest
from thinwire.systems.federated.algorithms.base import Algorithm
from thinwire.systems.federated.client import ClientContext, ClientResult


@dataclass(kw_only=True)
class Scaffold(Algorithm):
    """Control variates; each client keeps one, as large as the model."""

    operators: ClassVar[Mapping[str, Operator]] = {"delta": WEIGHTED_MEAN, "variate": SUM}
    stateful: ClassVar[bool] = True
    server_state: ClassVar[tuple[str, ...]] = ("theta", "c")
    compressible: ClassVar[frozenset[str]] = frozenset({"delta"})

    weights: str = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.momentum:
            raise ValueError("SCAFFOLD's control variates assume plain SGD: leave momentum= out")

    def setup(self, theta: Tensor, population: int, clients_per_round: int) -> None:
        """Begin a run: c = 0."""
        self.c: Tensor
        super().setup(theta, population, clients_per_round)

    def program(self, round: int) -> RoundProgram:
        """Make one visit and one step."""
        found = yield RoundRequest({"theta": self.theta, "c": self.c})
        self.theta = self.theta + self.server_lr * found["delta"]
        self.c = self.c + found["variate"] / self.population

    def train(
        self, context: ClientContext, payload: Mapping[str, Tensor], state: Mapping[str, Tensor] | None
    ) -> ClientResult:
        """Run corrected local SGD, and compute the new control variate."""
        theta, c = payload["theta"], payload["c"]
        own = torch.zeros_like(theta) if state is None else state["c"]
        correction = c - own

        def correct(g: Tensor, x: Tensor) -> None:
            g.add_(correction)

        local = self.local_sgd(context, theta, correct)
        change = (theta - local.x) / (local.steps * local.lr) - c
        return ClientResult({"delta": local.x - theta, "variate": change}, state={"c": own + change})
