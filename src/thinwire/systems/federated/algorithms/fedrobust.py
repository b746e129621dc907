"""FedRobust: FedAvg with the median or the trimmed mean of each coordinate, which a few bad clients cannot move far.

Paper: Yin et al.: Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018, Algorithm 1.

Client: as FedAvg. Server: theta += server_lr * c, where c[i] is the median of the clients' delta[i], or their mean
without the ``trim`` share of the largest and of the smallest values. A trimmed mean tolerates as many bad clients as it
leaves out on one side, the median fewer than half.

Differences from the paper: local steps instead of one gradient. For an even number of clients the median is the mean
of the middle two. Every client counts once, whatever number of samples it reports. Floating-point buffers (BatchNorm)
are still averaged: a model with such buffers is not protected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.systems.federated.aggregator import COLLECT, Operator, RoundProgram, RoundRequest
from thinwire.systems.federated.algorithms.fedavg import FedAvg
from thinwire.systems.federated.client import ClientContext, ClientResult

RULES = ("median", "trimmed")


@dataclass(kw_only=True)
class FedRobust(FedAvg):
    """FedAvg that tolerates some clients sending wrong changes.

    Args:
        rule: "median" or "trimmed".
        trim: for the trimmed mean: the share left out at each end.
    """

    operators: ClassVar[Mapping[str, Operator]] = {"delta": COLLECT}
    compressible: ClassVar[frozenset[str]] = frozenset()

    weights: str = "uniform"
    rule: str = "median"
    trim: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rule not in RULES:
            raise ValueError(f"rule={self.rule!r} is unknown; use one of {', '.join(RULES)}")
        if not 0 <= self.trim < 0.5:
            raise ValueError(f"trim={self.trim!r} must be at least 0 and below 0.5: that much is left out at each end")
        if self.weights != "uniform":
            raise ValueError(
                "weights='samples': a client that lies would count as much as it claims; leave weights= out"
            )

    def program(self, round: int) -> RoundProgram:
        """Make one visit and one step."""
        found = yield RoundRequest({"theta": self.theta})
        answers = [values.get("delta") for values in found.collected.values()]
        rows = [x for x in answers if x is not None and x.shape == self.theta.shape]
        if not rows:
            raise ValueError(f"no client of round {round} has answered with a change of the model's shape")
        out = (len(rows) - 1) // 2 if self.rule == "median" else int(self.trim * len(rows))
        middle = middle_of(torch.stack(rows), out)
        self.theta = self.theta + self.server_lr * middle.to(self.theta)

    def train(
        self, context: ClientContext, payload: Mapping[str, Tensor], state: Mapping[str, Tensor] | None
    ) -> ClientResult:
        """Train as FedAvg does, but send the change to be collected, not summed."""
        return ClientResult(collect=super().train(context, payload, state).reduce)


def middle_of(rows: Tensor, out: int) -> Tensor:
    """Return for each column of ``[clients, D]`` the mean without its ``out`` smallest and ``out`` largest, ``[D]``."""
    return rows.sort(dim=0).values[out : len(rows) - out].mean(dim=0, dtype=torch.float64)
