"""The weights, and what an update does with them: the mean of its contributions, then a step of any torch optimizer."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.core.checks import check_count, check_number
from thinwire.systems.parameter_server import checkpoint as checkpoints
from thinwire.systems.parameter_server.compress import ServerEnd
from thinwire.systems.parameter_server.effects import Apply, Contribution
from thinwire.systems.parameter_server.messages import Grad, Message, Stop, Weights
from thinwire.systems.parameter_server.settings import Settings

_KNOWN = 4  # contributions from which on it is known how long they are
Outer = Callable[[list[Tensor]], torch.optim.Optimizer]
"""Makes the server's optimizer from its parameters, one flat vector."""


class DelayedNesterov(torch.optim.Optimizer):
    """Nesterov momentum shared by N deltas (asynchronous local SGD, arXiv 2401.09135, section 5).

    If plain momentum were applied with every stale delta, the deltas would compound. Here each delta is applied at once
    with 1/N of the learning rate, and the momentum is updated and applied once every N deltas.

    Args:
        lr: outer learning rate.
        beta: momentum.
        period: N.
        activation: a, the share of the momentum that each delta applies; 0 to 1/N.

    Differences from the paper: none that we know of; the equations are those of its public re-implementations.
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float, beta: float = 0.9, period: int = 4, activation: float = 0.0
    ) -> None:
        check_number("lr", lr, least=0)
        check_count("period", period)
        if not 0 <= beta < 1:
            raise ValueError(f"beta={beta!r} must be at least 0 and below 1")
        if not 0 <= activation <= 1 / period:
            raise ValueError(f"activation={activation!r} must be in [0, 1/period], here at most {1 / period:g}")
        super().__init__(params, {"lr": lr, "beta": beta, "period": period, "activation": activation})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply the delta that ``.grad`` holds."""
        for group in self.param_groups:
            lr, beta, n, a = group["lr"], group["beta"], group["period"], group["activation"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"], state["sum"] = torch.zeros_like(p), torch.zeros_like(p)
                    state["count"] = torch.zeros((), dtype=torch.int64)
                state["sum"].add_(p.grad)
                state["count"] += 1
                share = a
                if int(state["count"]) % n == 0:
                    state["momentum"].mul_(beta).add_(state["sum"], alpha=1 / n)
                    state["sum"].zero_()
                    share = 1 - a * n + a
                p.add_(state["momentum"], alpha=-lr * share * beta).add_(p.grad, alpha=-lr / n)


def default_outer(settings: Settings, nodes: int) -> Outer:
    """Return a preset's optimizer: it trains without a learning-rate search. Stale momentum is harmful: 2401.09135."""
    if settings.sync_every is not None:
        if settings.grace is not None:
            return lambda params: torch.optim.SGD(params, lr=1.0)  # the mean change as it is
        if settings.balance:
            return lambda params: DelayedNesterov(params, lr=0.7, period=max(1, nodes))
        if settings.max_staleness == 0:
            return lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)
        return lambda params: torch.optim.SGD(params, lr=1.0 if settings.alpha == "invsqrt" else 0.07)
    # a scale for each element, and no momentum, which would add up stale gradients
    return lambda params: torch.optim.Adam(params, lr=1e-3, betas=(0.0, 0.99))


def usable(contributions: Iterable[Contribution], settings: Settings) -> list[Contribution]:
    """Return those that make an update, in the order of their sum."""
    parts = [part for part in contributions if part.tensor is not None]
    if settings.deterministic:  # so that the result does not depend on the order of arrival
        parts.sort(key=lambda part: (part.node, part.member, part.rows[0].worker, part.rows[0].step))
    return parts


def fingerprint(outer: Outer, dtype: torch.dtype) -> int:
    """Return 63 bits of a hash of an optimizer's type and options."""
    optimizer = outer([torch.zeros(1, dtype=dtype)])
    groups = [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
    kind = type(optimizer)
    text = json.dumps([kind.__qualname__, groups], sort_keys=True, default=repr)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


class Clip:
    """Bounds what a member can do in an update. ``cut``: how often, by member."""

    def __init__(self) -> None:
        self._recent = deque[float](maxlen=64)
        self.cut: Counter[int] = Counter()

    def __call__(self, part: Contribution) -> Contribution:
        """Return a contribution as it is or, if it is not finite or its norm is above 3 medians, cut to 0 or that."""
        length = float(torch.linalg.vector_norm(part.tensor))
        most = 3 * statistics.median(self._recent) if len(self._recent) >= _KNOWN else math.inf
        if length <= most and math.isfinite(length):
            self._recent.append(length)
            return part
        self.cut[part.member] += 1
        if not math.isfinite(length):
            return replace(part, tensor=torch.zeros_like(part.tensor))
        self._recent.append(most)
        return replace(part, scale=part.scale * most / length)


class FlatWeights:
    """Flat weights, or a slice, and their optimizer. ``snapshot``: never modified."""

    def __init__(self, parameters: Tensor, outer: Outer, settings: Settings) -> None:
        self.theta = parameters.detach().clone()
        self.snapshot = self.theta.clone()
        self.optimizer = outer([self.theta])
        self._settings, self.clip = settings, Clip()

    def apply(self, contributions: Iterable[Contribution]) -> None:
        """Make one update, unless no contribution is usable."""
        parts = usable(contributions, self._settings)
        if self._settings.robust:
            parts = [self.clip(part) for part in parts]
        if parts:
            self.step([(part.tensor, part.scale) for part in parts], sum(len(part.rows) for part in parts))

    def restore(self, theta: Tensor, optimizer: dict[str, Any]) -> None:
        with torch.no_grad():
            self.theta.copy_(theta)
        self.snapshot = self.theta.clone()
        try:
            self.optimizer.load_state_dict(optimizer)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"the checkpoint is from another optimizer ({error}): give the one that it was made with (outer=, or "
                "--outer)"
            ) from error

    def step(self, terms: Iterable[tuple[Tensor, float]], gradients: int) -> None:
        """Step with sum(scale * tensor) / gradients over (tensor, scale), at least one, in order.

        Each element is computed separately, so slices of the tensors give slices of the result, bit for bit.
        """
        total: Tensor | None = None
        for tensor, scale in terms:
            x = tensor.double() if self._settings.deterministic else tensor
            x = x * scale if scale != 1.0 else x
            total = x if total is None else total + x
        assert total is not None
        self.theta.grad = (total if gradients == 1 else total / gradients).to(self.theta.dtype)
        self.optimizer.step()
        self.theta.grad = None
        self.snapshot = self.theta.clone()


class LocalWeights:
    """Weights in the server's own process; :class:`shards.ShardedWeights` does the same with shard processes."""

    def __init__(self, weights: FlatWeights, end: ServerEnd) -> None:
        self.weights, self._end = weights, end

    def read(self, message: Grad) -> Grad:
        """Check and decode a sum from a leader; called in the peer's thread. ``ValueError``: it is not valid."""
        if bool(message.rows) != (message.tensor is not None):
            raise ValueError("a sum arrived without its gradients, or gradients without their sum")
        return message if message.tensor is None else replace(message, tensor=self._end.sum(message.tensor))

    def attach_payload(self, member: int, message: Message) -> Message:
        if isinstance(message, Weights) and not message.same:
            tensor, delta = self._end.weights(member, self.weights.snapshot)
            return replace(message, tensor=tensor, delta=delta)
        return replace(message, tensor=self.weights.snapshot) if isinstance(message, Stop) else message

    def forget(self, member: int) -> None:
        self._end.forget(member)

    def apply(self, effect: Apply, show: bool, done: Callable[[Tensor | None], None]) -> None:
        self.weights.apply(effect.contributions)
        done(self.weights.snapshot if show else None)

    def save(self, directory: str | Path, saved: checkpoints.Saved) -> None:
        state = self.weights.optimizer.state_dict()
        checkpoints.save(directory, replace(saved, theta=self.weights.theta.detach(), optimizer=state))
