"""FedAvg: local SGD, then the mean of the changes.

Paper: McMahan et al.: Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017,
Algorithm 1.

Client: x from theta by SGD; answer: delta = x - theta. Server: theta += server_lr * mean(delta), weighted by samples.

Differences from the paper: changes are sent instead of weights, which is the same for ``server_lr=1``; clients that
fail are left out of the mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from thinwire.systems.federated.aggregator import WEIGHTED_MEAN, Operator, RoundProgram, RoundRequest
from thinwire.systems.federated.algorithms.base import Algorithm
from thinwire.systems.federated.client import ClientContext, ClientResult


@dataclass(kw_only=True)
class FedAvg(Algorithm):
    """Local SGD, and the mean of the changes."""

    operators: ClassVar[Mapping[str, Operator]] = {"delta": WEIGHTED_MEAN}
    compressible: ClassVar[frozenset[str]] = frozenset({"delta"})

    def program(self, round: int) -> RoundProgram:
        """Make one visit and one step."""
        mean = yield RoundRequest({"theta": self.theta})
        self.theta = self.theta + self.server_lr * mean["delta"]

    def train(
        self, context: ClientContext, payload: Mapping[str, Tensor], state: Mapping[str, Tensor] | None
    ) -> ClientResult:
        """Run local SGD."""
        local = self.local_sgd(context, payload["theta"])
        return ClientResult({"delta": local.x - payload["theta"]})
