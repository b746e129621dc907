"""The algorithms: what a client does, what is summed, what the server does with the sum."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from thinwire.core.checks import check_choice, check_count, check_number
from thinwire.systems.federated.aggregator import (
    COLLECT,
    SUM,
    WEIGHTED_MEAN,
    ClientContext,
    ClientResult,
    Operator,
    RoundProgram,
    RoundRequest,
)
from thinwire.systems.federated.data import sample
from thinwire.systems.federated.private import opacus, private_gradients

__all__ = ["FedAvg", "FedDyn", "FedNova", "FedOpt", "FedProx", "FedRobust", "Mime", "Scaffold"]  # what the verb knows

Tensors = Mapping[str, Tensor]
Adjust = Callable[[Tensor, Tensor], Any]
"""(gradient, x): modify the gradient [D] in place before the step."""


class LocalResult(NamedTuple):
    x: Tensor  # the weights, [D]; this is the model's own memory, so copy what you keep
    steps: int  # how many were made
    lr: float  # their learning rate


@dataclass(kw_only=True)
class Algorithm(abc.ABC):
    """An executor and an aggregator in one object: ``train`` runs for every client, ``program`` once a round.

    ``self`` belongs to the server: ``train`` only reads options from it, and stores nothing on it.

    Args:
        lr: learning rate of the local steps.
        lr_decay: factor applied to ``lr`` after every round.
        epochs: passes over a client's samples.
        batch_size: of the local steps; None: all samples of the client.
        max_steps: most local steps of a client; None: as many as its epochs have.
        momentum, weight_decay: of the local steps, as in ``torch.optim.SGD``.
        max_grad_norm: limit of the norm of each local gradient; None: none.
        noise_multiplier: DP-SGD: ``max_grad_norm`` limits the gradient of each *sample*, and the noise on their sum is
            this many times the limit; see :mod:`~thinwire.federated.private`. None: plain SGD.
        server_lr: learning rate of the server's step.
        weights: how a client is weighted in means: "samples" or "uniform".

    Attributes:
        theta: the server's weights, ``[D]``.
        operators: how the values returned by clients are combined.
        stateful: whether clients keep a state.
        server_state: names of the server's tensors, which checkpoints hold.
        compressible: names under ``reduce`` that may be compressed: changes, not weights, and only those from which
            nothing else is derived.
    """

    operators: ClassVar[Mapping[str, Operator]] = {}
    stateful: ClassVar[bool] = False
    server_state: ClassVar[tuple[str, ...]] = ("theta",)
    compressible: ClassVar[frozenset[str]] = frozenset()

    lr: float = 0.1
    lr_decay: float = 1.0
    epochs: int = 1
    batch_size: int | None = 32
    max_steps: int | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0
    max_grad_norm: float | None = None
    noise_multiplier: float | None = None
    server_lr: float = 1.0
    weights: str = "samples"

    def __post_init__(self) -> None:
        for name in ("lr", "lr_decay", "server_lr", "max_grad_norm", "noise_multiplier"):
            if (rate := getattr(self, name)) is not None:
                check_number(name, rate, above=0)
        for name in ("batch_size", "max_steps", "epochs"):
            if (count := getattr(self, name)) is not None:
                check_count(name, count)
        check_below_1("momentum", self.momentum)
        check_number("weight_decay", self.weight_decay, least=0)
        if self.noise_multiplier is not None and self.max_grad_norm is None:
            raise ValueError("noise_multiplier= is in units of max_grad_norm=: give both")
        check_choice("weights", self.weights, ("samples", "uniform"))

    def setup(self, theta: Tensor, population: int, clients_per_round: int) -> None:
        """Begin a run with these weights ``[D]``. The server's other tensors start at zero."""
        if self.noise_multiplier is not None:
            opacus()
        self.theta = theta
        self.population = population
        for name in self.server_state:
            if name != "theta":
                setattr(self, name, torch.zeros_like(theta))

    def select(self, round: int, population: int, clients_per_round: int, seed: int) -> Sequence[int]:
        """Return the clients of a round: uniform, without replacement."""
        return sample(seed, round, population, clients_per_round)

    @abc.abstractmethod
    def program(self, round: int) -> RoundProgram:
        """Run one round on the server."""

    @abc.abstractmethod
    def train(self, context: ClientContext, payload: Tensors, state: Tensors | None) -> ClientResult:
        """Do one client's work."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the server's tensors by name."""
        return {name: getattr(self, name) for name in self.server_state}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a ``state_dict``.

        Raises:
            ValueError: a tensor is missing or has another shape.
        """
        for name in self.server_state:
            if name not in state or state[name].shape != getattr(self, name).shape:
                raise ValueError(f"the state contains no {name!r} of shape {tuple(getattr(self, name).shape)}")
            setattr(self, name, state[name].clone())

    def shape_of(self, name: str) -> Sequence[int]:
        """Return the required shape of what clients return under a summed name; by default that of theta."""
        return tuple(self.theta.shape)

    @property
    def visits(self) -> int:
        """Number of visits in a round."""
        return 1

    def rate(self, round: int) -> float:
        """Return the local learning rate of a round."""
        return self.lr * self.lr_decay**round

    def local_sgd(self, context: ClientContext, theta: Tensor, adjust: Adjust | None = None) -> LocalResult:
        """Run plain SGD, with momentum and decay if set, from ``theta`` on the client's samples.

        Args:
            context: the client.
            theta: ``[D]``, not modified.
            adjust: the algorithm's change to each gradient (after clipping, before momentum).
        """
        x, lr, steps = context.x, self.rate(context.round), 0
        x.copy_(theta)
        velocity = torch.zeros_like(x) if self.momentum else None
        for g in self._gradients(context):
            with torch.no_grad():
                if self.weight_decay:
                    g.add_(x, alpha=self.weight_decay)
                if adjust is not None:
                    adjust(g, x)
                x.add_(g if velocity is None else velocity.mul_(self.momentum).add_(g), alpha=-lr)
            steps += 1
        return LocalResult(x, steps, lr)

    def _gradients(self, context: ClientContext) -> Iterator[Tensor]:
        if self.noise_multiplier is not None:
            yield from private_gradients(self, context)
            return
        for batch in context.steps(self.epochs, self.batch_size, self.max_steps):
            g = context.gradient(batch)
            if self.max_grad_norm is not None:
                g.mul_((self.max_grad_norm / (torch.linalg.vector_norm(g) + 1e-6)).clamp(max=1.0))
            yield g


def check_below_1(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{name}={value} must be at least 0 and below 1")


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
        return ClientResult({"delta": self.local_sgd(context, payload["theta"]).x - payload["theta"]})


def _proximal(mu: float, theta: Tensor) -> Adjust | None:
    """Return FedProx's proximal term, which adds mu * (x - theta) to each gradient; None if ``mu`` is 0."""
    return (lambda g, x: g.add_(x, alpha=mu).sub_(theta, alpha=mu)) if mu else None


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
        return ClientResult(collect=super().train(context, payload, state).reduce)


def middle_of(rows: Tensor, out: int) -> Tensor:
    """Return for each column of ``[clients, D]`` the mean without its ``out`` smallest and ``out`` largest, ``[D]``."""
    return rows.sort(dim=0).values[out : len(rows) - out].mean(dim=0, dtype=torch.float64)


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
        local = self.local_sgd(context, theta, lambda g, x: g.add_(correction))
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
        pulled = lambda g, x: g.sub_(own).add_(x, alpha=alpha).sub_(theta, alpha=alpha)  # noqa: E731
        local = self.local_sgd(context, theta, pulled)
        change = local.x - theta
        return ClientResult({"x": local.x, "change": change}, state={"h": own - alpha * change})


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
