"""FedAvg and the algorithms that change only its client's step, or only its server's: no client keeps anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.core.checks import check_choice, check_number
from thinwire.systems.federated.aggregator import (
    COLLECT,
    WEIGHTED_MEAN,
    ClientContext,
    ClientResult,
    Operator,
    RoundProgram,
    RoundRequest,
)
from thinwire.systems.federated.algorithms.base import Adjust, Algorithm, Tensors, check_below_1


@dataclass(kw_only=True)
class FedAvg(Algorithm):
    """Local SGD, then the mean of the changes.

    Paper: McMahan et al.: Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017,
    Algorithm 1.

    Client: x from theta by SGD; answer: delta = x - theta. Server: theta += server_lr * mean(delta), weighted by
    samples.

    Differences from the paper: changes are sent instead of weights, which is the same for ``server_lr=1``; clients that
    fail are left out of the mean.
    """

    operators: ClassVar[Mapping[str, Operator]] = {"delta": WEIGHTED_MEAN}
    compressible: ClassVar[frozenset[str]] = frozenset({"delta"})

    def program(self, round: int) -> RoundProgram:
        mean = yield RoundRequest({"theta": self.theta})
        self.theta = self.theta + self.server_lr * mean["delta"]

    def train(self, context: ClientContext, payload: Tensors, state: Tensors | None) -> ClientResult:
        local = self.local_sgd(context, payload["theta"])
        return ClientResult({"delta": local.x - payload["theta"]})


def _proximal(mu: float, theta: Tensor) -> Adjust | None:
    """Return FedProx's proximal term, which adds mu * (x - theta) to each gradient; None if ``mu`` is 0."""

    def pull(g: Tensor, x: Tensor) -> None:
        g.add_(x, alpha=mu).sub_(theta, alpha=mu)

    return pull if mu else None


@dataclass(kw_only=True)
class FedProx(FedAvg):
    """FedAvg with a pull towards the server's weights in every local step.

    Paper: Li et al.: Federated Optimization in Heterogeneous Networks, MLSys 2020, equation 2.

    Client: mu * (x - theta) is added to each gradient. Server: as FedAvg; with mu = 0 it is FedAvg.

    Differences from the paper: the user sets the number of local steps; inexactness is not measured.

    Args:
        mu: weight of the proximal term.
    """

    mu: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("mu", self.mu, least=0)

    def train(self, context: ClientContext, payload: Tensors, state: Tensors | None) -> ClientResult:
        theta = payload["theta"]
        local = self.local_sgd(context, theta, _proximal(self.mu, theta))
        return ClientResult({"delta": local.x - theta})


@dataclass(kw_only=True)
class FedNova(Algorithm):
    """FedAvg in which clients that make more local steps do not count more.

    Paper: Wang et al.: Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, NeurIPS
    2020, equation 8 and Table 1.

    Client: delta / a, where a is the L1 norm of the weights with which its gradients enter delta: tau for tau plain
    steps; with momentum r, (tau - r (1 - r^tau) / (1 - r)) / (1 - r); with FedProx's term, (1 - (1 - lr mu)^tau) / (lr
    mu). Server: theta += server_lr * mean(a) * mean(delta / a). With equal step counts it is FedAvg.

    Differences from the paper: momentum and FedProx's term cannot be combined (refused); the server's own momentum is
    left out. The authors' code (JYWa/FedNova) scales the step by the mean number of local steps if mu > 0 and by
    mean(a) otherwise; here it is always mean(a), so that with equal step counts FedNova with mu is FedProx with mu: at
    lr 0.3, mu 0.5 and 6 steps the factor is 4.15 here and 6 there.

    Args:
        mu: weight of a proximal term as in FedProx; 0: none.
    """

    operators: ClassVar[Mapping[str, Operator]] = {"direction": WEIGHTED_MEAN, "a": WEIGHTED_MEAN}
    compressible: ClassVar[frozenset[str]] = frozenset({"direction"})

    mu: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("mu", self.mu, least=0)
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
        mean = yield RoundRequest({"theta": self.theta})
        self.theta = self.theta + self.server_lr * mean["a"] * mean["direction"]

    def train(self, context: ClientContext, payload: Tensors, state: Tensors | None) -> ClientResult:
        theta = payload["theta"]
        local = self.local_sgd(context, theta, _proximal(self.mu, theta))
        a = self.norm(local.steps, local.lr)
        return ClientResult({"direction": (local.x - theta) / a, "a": theta.new_tensor([a])})


@dataclass(kw_only=True)
class FedOpt(FedAvg):
    """FedAvg whose server uses the mean change as the gradient of Adam, Yogi or Adagrad.

    Paper: Reddi et al.: Adaptive Federated Optimization, ICLR 2021, Algorithm 2.

    Server, with d the mean change: m = b1 m + (1 - b1) d; v by the rule; theta += server_lr * m / (sqrt(v) + tau).
    adagrad: v += d^2; adam: v = b2 v + (1 - b2) d^2; yogi: v -= (1 - b2) d^2 sign(v - d^2); "sgd": theta += server_lr
    * d.

    Differences from the paper: none in the rules. As in the paper there is no bias correction, so "adam" is not
    ``torch.optim.Adam``; v starts at ``tau^2``.

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
        check_choice("rule", self.rule, ("adam", "yogi", "adagrad", "sgd"))
        check_below_1("beta1", self.beta1)
        check_below_1("beta2", self.beta2)
        check_number("tau", self.tau, above=0)

    def setup(self, theta: Tensor, population: int, clients_per_round: int) -> None:
        """Begin a run: m = 0, v = tau^2."""
        super().setup(theta, population, clients_per_round)
        self.m: Tensor
        self.v: Tensor = torch.full_like(theta, self.tau**2)

    def program(self, round: int) -> RoundProgram:
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


@dataclass(kw_only=True)
class FedRobust(FedAvg):
    """FedAvg with the median or the trimmed mean of each coordinate, which a few bad clients cannot move far.

    Paper: Yin et al.: Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018, Algorithm 1.

    Client: as FedAvg. Server: theta += server_lr * c, where c[i] is the median of the clients' delta[i], or their mean
    without the ``trim`` share of the largest and of the smallest values. A trimmed mean tolerates as many bad clients
    as it leaves out on one side, the median fewer than half.

    Differences from the paper: local steps instead of one gradient. For an even number of clients the median is the
    mean of the middle two. Every client counts once, whatever number of samples it reports. Floating-point buffers
    (BatchNorm) are still averaged: a model with such buffers is not protected.

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
        check_choice("rule", self.rule, ("median", "trimmed"))
        if not 0 <= self.trim < 0.5:
            raise ValueError(f"trim={self.trim!r} must be at least 0 and below 0.5: that much is left out at each end")
        if self.weights != "uniform":
            raise ValueError(
                "weights='samples': a client that lies would count as much as it claims; leave weights= out"
            )

    def program(self, round: int) -> RoundProgram:
        found = yield RoundRequest({"theta": self.theta})
        answers = [values.get("delta") for values in found.collected.values()]
        rows = [x for x in answers if x is not None and x.shape == self.theta.shape]
        if not rows:
            raise ValueError(f"no client of round {round} has answered with a change of the model's shape")
        out = (len(rows) - 1) // 2 if self.rule == "median" else int(self.trim * len(rows))
        middle = middle_of(torch.stack(rows), out)
        self.theta = self.theta + self.server_lr * middle.to(self.theta)

    def train(self, context: ClientContext, payload: Tensors, state: Tensors | None) -> ClientResult:
        """Train as FedAvg does, but send the change to be collected, not summed."""
        return ClientResult(collect=super().train(context, payload, state).reduce)


def middle_of(rows: Tensor, out: int) -> Tensor:
    """Return for each column of ``[clients, D]`` the mean without its ``out`` smallest and ``out`` largest, ``[D]``."""
    return rows.sort(dim=0).values[out : len(rows) - out].mean(dim=0, dtype=torch.float64)
