"""SCAFFOLD and FedDyn: each client keeps a vector as large as the model, which corrects its local steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.core.checks import check_number
from thinwire.systems.federated.aggregator import (
    SUM,
    WEIGHTED_MEAN,
    ClientContext,
    ClientResult,
    Operator,
    RoundProgram,
    RoundRequest,
)
from thinwire.systems.federated.algorithms.base import Algorithm, Tensors


@dataclass(kw_only=True)
class Scaffold(Algorithm):
    """Local gradients corrected by the usual difference between the client's gradient and the mean.

    Paper: Karimireddy et al.: SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020, Algorithm 1,
    option II.

    Client i keeps c_i. Step: x -= lr (g - c_i + c); then c_i' = c_i - c + (theta - x) / (steps lr).
    Server: theta += server_lr * mean(x - theta), uniform; c += sum(c_i' - c_i) / M, M the whole population.

    Differences from the paper: ``weights="samples"`` may weight the mean of x (c stays uniform).
    """

    operators: ClassVar[Mapping[str, Operator]] = {"delta": WEIGHTED_MEAN, "variate": SUM}
    stateful: ClassVar[bool] = True
    server_state: ClassVar[tuple[str, ...]] = ("theta", "c")
    compressible: ClassVar[frozenset[str]] = frozenset({"delta"})

    weights: str = "uniform"

    def __post_init__(self) -> None:
        self.c: Tensor
        super().__post_init__()
        if self.momentum:
            raise ValueError("SCAFFOLD's control variates assume plain SGD: leave momentum= out")

    def program(self, round: int) -> RoundProgram:
        found = yield RoundRequest({"theta": self.theta, "c": self.c})
        self.theta = self.theta + self.server_lr * found["delta"]
        self.c = self.c + found["variate"] / self.population

    def train(self, context: ClientContext, payload: Tensors, state: Tensors | None) -> ClientResult:
        theta, c = payload["theta"], payload["c"]
        own = torch.zeros_like(theta) if state is None else state["c"]
        correction = c - own

        def correct(g: Tensor, x: Tensor) -> None:
            g.add_(correction)

        local = self.local_sgd(context, theta, correct)
        change = (theta - local.x) / (local.steps * local.lr) - c
        return ClientResult({"delta": local.x - theta, "variate": change}, state={"c": own + change})


@dataclass(kw_only=True)
class FedDyn(Algorithm):
    """Each client's loss gets a linear and a quadratic term, so that local and global optima agree.

    Paper: Acar et al.: Federated Learning Based on Dynamic Regularization, ICLR 2021, Algorithm 1.

    Client i keeps h_i. Step: x -= lr (g - h_i + alpha (x - theta)); then h_i' = h_i - alpha (x - theta).
    Server: h -= (alpha / M) sum(x - theta), M the whole population; theta = mean(x) - h / alpha, uniform.

    Differences from the paper: a client's problem is solved by the given number of local steps, not to convergence;
    ``weights="samples"`` may weight the mean of x.

    Args:
        alpha: weight of the quadratic term.
    """

    operators: ClassVar[Mapping[str, Operator]] = {"x": WEIGHTED_MEAN, "change": SUM}
    stateful: ClassVar[bool] = True
    server_state: ClassVar[tuple[str, ...]] = ("theta", "h")

    weights: str = "uniform"
    alpha: float = 0.1

    def __post_init__(self) -> None:
        self.h: Tensor
        super().__post_init__()
        check_number("alpha", self.alpha, above=0)
        if self.server_lr != 1:
            raise ValueError("FedDyn sets the server's weights and takes no step: leave server_lr= out")

    def program(self, round: int) -> RoundProgram:
        found = yield RoundRequest({"theta": self.theta})
        self.h = self.h - (self.alpha / self.population) * found["change"]
        self.theta = found["x"] - self.h / self.alpha

    def train(self, context: ClientContext, payload: Tensors, state: Tensors | None) -> ClientResult:
        theta, alpha = payload["theta"], self.alpha
        own = torch.zeros_like(theta) if state is None else state["h"]

        def regularise(g: Tensor, x: Tensor) -> None:
            g.sub_(own).add_(x, alpha=alpha).sub_(theta, alpha=alpha)

        local = self.local_sgd(context, theta, regularise)
        change = local.x - theta
        return ClientResult({"x": local.x, "change": change}, state={"h": own - alpha * change})
