"""Mime: local steps with the server's momentum, in two visits to the same cohort."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.systems.federated.aggregator import (
    WEIGHTED_MEAN,
    ClientContext,
    ClientResult,
    Operator,
    RoundProgram,
    RoundRequest,
)
from thinwire.systems.federated.algorithms.base import Algorithm, Tensors, check_below_1


@dataclass(kw_only=True)
class Mime(Algorithm):
    """Local steps with the server's momentum, kept fixed, and gradients corrected with the whole cohort's gradient.

    Paper: Karimireddy et al.: Mime: Mimicking Centralized Stochastic Algorithms in Federated Learning, 2020, Algorithm
    1 with SGD with momentum.

    Visit 1: c = mean of the clients' full gradients at theta. Visit 2, on the same cohort: x -= lr ((1 - b)(g(x) -
    g(theta) + c) + b s), both gradients on the same batch. Server: theta = mean x; s = (1 - b) c + b s. ``lite=True``:
    no correction, so one visit is enough.

    Differences from the paper: momentum SGD only; means weighted by samples.

    Args:
        beta: momentum of the server.
        lite: without the correction (MimeLite).
    """

    operators: ClassVar[Mapping[str, Operator]] = {"x": WEIGHTED_MEAN, "gradient": WEIGHTED_MEAN}
    server_state: ClassVar[tuple[str, ...]] = ("theta", "s")

    beta: float = 0.9
    lite: bool = False

    def __post_init__(self) -> None:
        self.s: Tensor
        super().__post_init__()
        check_below_1("beta", self.beta)
        if self.momentum:
            raise ValueError("Mime's momentum is the server's: use beta=, and leave momentum= out")
        if self.max_grad_norm is not None:
            raise ValueError("Mime's corrected gradients are not clipped: leave max_grad_norm= out")

    @property
    def visits(self) -> int:
        """Two, or one with ``lite``."""
        return 1 if self.lite else 2

    def program(self, round: int) -> RoundProgram:
        b, payload = self.beta, {"theta": self.theta, "s": self.s}
        if self.lite:
            mean = yield RoundRequest(payload)
            c = mean["gradient"]
        else:
            c = (yield RoundRequest({"theta": self.theta}, "gradient"))["gradient"]
            mean = yield RoundRequest({**payload, "c": c})
        self.theta = self.theta + self.server_lr * (mean["x"] - self.theta) if self.server_lr != 1 else mean["x"]
        self.s = (1 - b) * c + b * self.s

    def train(self, context: ClientContext, payload: Tensors, state: Tensors | None) -> ClientResult:
        """Compute the full gradient at theta, or make the local steps, or (lite) both."""
        theta, b = payload["theta"], self.beta
        if context.visit == "gradient":
            return ClientResult({"gradient": self._full_gradient(context, theta)})
        result = {"gradient": self._full_gradient(context, theta)} if self.lite else {}
        x, lr, push = theta.clone(), self.rate(context.round), b * payload["s"]
        for batch in context.steps(self.epochs, self.batch_size, self.max_steps):
            g = self._gradient(context, x, batch).clone()
            if not self.lite:
                g += payload["c"] - self._gradient(context, theta, batch)
            x -= lr * ((1 - b) * g + push)
        return ClientResult({**result, "x": x})

    def _gradient(self, context: ClientContext, x: Tensor, batch: object) -> Tensor:
        context.x.copy_(x)
        g = context.gradient(batch)
        return g.add_(x, alpha=self.weight_decay) if self.weight_decay else g

    def _full_gradient(self, context: ClientContext, theta: Tensor) -> Tensor:
        """Return the gradient over all samples of the client, computed in batches weighted by their size."""
        total, seen = torch.zeros_like(theta), 0
        for batch in context.steps(1, self.batch_size):
            size = len(batch[0]) if isinstance(batch, (tuple, list)) else 1
            total += self._gradient(context, theta, batch) * size
            seen += size
        return total / seen
