"""FedOpt: FedAvg whose server uses the mean change as the gradient of Adam, Yogi or Adagrad.

Paper: Reddi et al.: Adaptive Federated Optimization, ICLR 2021, Algorithm 2.

Server, with d the mean change: m = b1 m + (1 - b1) d; v by the rule; theta += server_lr * m / (sqrt(v) + tau).
adagrad: v += d^2; adam: v = b2 v + (1 - b2) d^2; yogi: v -= (1 - b2) d^2 sign(v - d^2); "sgd": theta += server_lr * d.

Differences from the paper: none in the rules. As in the paper there is no bias correction, so "adam" is not
``torch.optim.Adam``; v starts at ``tau^2``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.systems.federated.aggregator import RoundProgram, RoundRequest
from thinwire.systems.federated.algorithms.base import positive
from thinwire.systems.federated.algorithms.fedavg import FedAvg

RULES = ("adam", "yogi", "adagrad", "sgd")


@dataclass(kw_only=True)
class FedOpt(FedAvg):
    """FedAvg with an adaptive server.

    Args:
        rule: "adam", "yogi", "adagrad", or "sgd", which is FedAvg.
        beta1, beta2: of the moments; adagrad has no ``beta2``.
        tau: added to the denominator.
    """

    server_state: ClassVar[tuple[str, ...]] = ("theta", "m", "v")

    rule: str = "adam"
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rule not in RULES:
            raise ValueError(f"rule={self.rule!r} is unknown; use one of {', '.join(RULES)}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0 and below 1")
        positive("tau", self.tau)

    def setup(self, theta: Tensor, population: int, clients_per_round: int) -> None:
        """Begin a run: m = 0, v = tau^2."""
        super().setup(theta, population, clients_per_round)
        self.m: Tensor
        self.v: Tensor = torch.full_like(theta, self.tau**2)

    def program(self, round: int) -> RoundProgram:
        """Make one visit and one adaptive step."""
        d = (yield RoundRequest({"theta": self.theta}))["delta"]
        if self.rule == "sgd":
            self.theta = self.theta + self.server_lr * d
            return
        square = d * d
        self.m = self.beta1 * self.m + (1 - self.beta1) * d
        if self.rule == "adagrad":
            self.v = self.v + square
        elif self.rule == "adam":
            self.v = self.beta2 * self.v + (1 - self.beta2) * square
        else:
            self.v = self.v - (1 - self.beta2) * square * torch.sign(self.v - square)
        self.theta = self.theta + self.server_lr * self.m / (self.v.sqrt() + self.tau)
