"""FedDyn: each client's loss gets a linear and a quadratic term, so that local and global optima agree.

Paper: Acar et al.: Federated Learning Based on Dynamic Regularization, ICLR 2021, Algorithm 1.

Client i keeps h_i. Step: x -= lr (g - h_i + alpha (x - theta)); then h_i' = h_i - alpha (x - theta).
Server: h -= (alpha / M) sum(x - theta), M the whole population; theta = mean(x) - h / alpha, uniform.

Differences from the paper: a client's problem is solved by the given number of local steps, not to convergence;
``weights="samples"`` may weight the mean of x.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.systems.federated.aggregator import SUM, WEIGHTED_MEAN, Operator, RoundProgram, RoundRequest
from thinwire.systems.federated.algorithms.base import Algorithm, positive
from thinwire.systems.federated.client import ClientContext, ClientResult


@dataclass(kw_only=True)
class FedDyn(Algorithm):
    """Dynamic regularisation; each client keeps a vector as large as the model.

    Args:
        alpha: weight of the quadratic term.
    """

    operators: ClassVar[Mapping[str, Operator]] = {"x": WEIGHTED_MEAN, "change": SUM}
    stateful: ClassVar[bool] = True
    server_state: ClassVar[tuple[str, ...]] = ("theta", "h")

    weights: str = "uniform"
    alpha: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("alpha", self.alpha)
        if self.server_lr != 1:
            raise ValueError("FedDyn sets the server's weights and takes no step: leave server_lr= out")

    def setup(self, theta: Tensor, population: int, clients_per_round: int) -> None:
        """Begin a run: h = 0."""
        self.h: Tensor
        super().setup(theta, population, clients_per_round)

    def program(self, round: int) -> RoundProgram:
        """Make one visit."""
        found = yield RoundRequest({"theta": self.theta})
        self.h = self.h - (self.alpha / self.population) * found["change"]
        self.theta = found["x"] - self.h / self.alpha

    def train(
        self, context: ClientContext, payload: Mapping[str, Tensor], state: Mapping[str, Tensor] | None
    ) -> ClientResult:
        """Run regularised local SGD, and compute the new linear term."""
        theta, alpha = payload["theta"], self.alpha
        own = torch.zeros_like(theta) if state is None else state["h"]

        def regularise(g: Tensor, x: Tensor) -> None:
            g.sub_(own).add_(x, alpha=alpha).sub_(theta, alpha=alpha)

        local = self.local_sgd(context, theta, regularise)
        change = local.x - theta
        return ClientResult({"x": local.x, "change": change}, state={"h": own - alpha * change})
