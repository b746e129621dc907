"""A device: trains one client after another, adds up their answers, and keeps nothing of any client.

Everything that a client could leave behind is reset before the next one: weights, buffers, frozen parameters,
gradients, and the generators of torch, numpy and Python. The executor makes a new optimizer for every client.

The sums have one of three arithmetics. ``fp32`` and ``fp64`` add floats, so another order of clients or devices can
change the last bits (in fp64 rarely, because the sum is rounded to fp32 once, but it can). ``exact`` adds integers in
int64, the nearest to w x 2^40, so no order changes a bit. Each term has an error of at most 2^-41, and the sum must
stay below 2^22, which is checked before use.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.core.checks import check_choice
from thinwire.core.methods import base
from thinwire.systems.federated.aggregator import WEIGHTED_MEAN, ClientContext, ClientResult, Loss, RoundRequest
from thinwire.systems.federated.data import ClientData, client_seed, to_device
from thinwire.systems.federated.state import ClientStateStore
from thinwire.systems.federated.workspace import Workspace

BUFFERS = "buffers"  # the name under which floating-point buffers are sent; they are averaged like weights
REDUCTIONS = {"fp32": torch.float32, "fp64": torch.float64, "exact": torch.int64}
_SCALE = 2.0**40
_LIMIT = 2.0**22


class Accumulator:
    """Weighted sums by name, in "fp32", "fp64" or "exact"; ``bounds``: with "exact", on their largest magnitude."""

    def __init__(self, mode: str) -> None:
        self.mode = check_choice("reduction", mode, REDUCTIONS)
        self.sums: dict[str, Tensor] = {}
        self.bounds: dict[str, float] = {}

    def add(self, name: str, x: Tensor, weight: float) -> None:
        x = x.detach()
        total = self.sums.get(name)
        if total is None:
            total = self.sums[name] = torch.zeros(x.shape, dtype=REDUCTIONS[self.mode], device=x.device)
            self.bounds[name] = 0.0
        elif total.shape != x.shape:
            raise ValueError(f"{name!r} has the shape {tuple(x.shape)} here, but {tuple(total.shape)} elsewhere")
        if self.mode != "exact":
            total.add_(x, alpha=weight)
            return
        scaled = x.double().mul_(weight)
        if scaled.numel():
            self.bounds[name] += float(scaled.abs().max())
        if self.bounds[name] < _LIMIT:  # beyond it the result is refused; avoid overflow until then
            total.add_(scaled.mul_(_SCALE).round_().to(torch.int64))

    def merge(self, other: Accumulator) -> None:
        for name, x in other.sums.items():
            if name in self.sums:
                self.sums[name] += x
                self.bounds[name] += other.bounds[name]
            else:
                self.sums[name], self.bounds[name] = x.clone(), other.bounds[name]

    def flat(self, shapes: Mapping[str, list[int]], device: torch.device) -> Tensor:
        """Return all sums as one vector, in order of the names; zeros for sums that this device does not have."""
        dtype = REDUCTIONS[self.mode]
        parts = [
            self.sums[name].reshape(-1)
            if name in self.sums
            else torch.zeros(torch.Size(shapes[name]).numel(), dtype=dtype, device=device)
            for name in sorted(shapes)
        ]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=dtype, device=device)

    def take(self, flat: Tensor, shapes: Mapping[str, list[int]], bounds: Mapping[str, float]) -> None:
        """Set the sums from the vector that ``flat`` returned, after it was summed over devices."""
        names = sorted(shapes)
        for name, piece in zip(names, flat.split([torch.Size(shapes[name]).numel() for name in names])):
            self.sums[name], self.bounds[name] = piece.view(shapes[name]), bounds[name]

    def result(self, name: str, factor: float, dtype: torch.dtype) -> Tensor:
        """Return ``factor`` times a sum, rounded to ``dtype`` once; ``OverflowError``: it may have left its range."""
        total = self.sums[name]
        if self.mode == "exact":
            if not self.bounds[name] < _LIMIT:
                raise OverflowError(
                    f"{name!r} adds up to {self.bounds[name]:.3g}, but reduction='exact' can hold only 2^22: "
                    "use reduction='fp64', or find out why an update is so large"
                )
            total = total.double().mul_(1 / _SCALE)
        return (total * factor if factor != 1.0 else total.clone()).to(dtype)


def all_finite(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether all elements of all tensors, on one device, are finite. Reads one value from the device."""
    flags = [base.all_finite(x.detach()) for x in tensors.values() if x.dtype.is_floating_point]
    return not flags or bool(torch.stack(flags).all())


def bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def seed_everything(seed: int) -> None:
    if torch.cuda.is_initialized():
        torch.manual_seed(seed)
    else:  # the same on a CPU, without touching other device types
        torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    python, array = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(array)


@dataclass
class Sums:
    """What one device reports: sums of its clients' answers, and facts about the clients."""

    sums: Accumulator
    samples: int = 0  # total over the clients that answered, like the next
    clients: int = 0
    seconds: list[tuple[int, int, float]] = field(default_factory=list)  # (client, samples, seconds) of all
    collected: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # by client, then by name
    failed: dict[int, str] = field(default_factory=dict)  # client -> reason
    metrics: dict[str, float] = field(default_factory=dict)  # sums of samples times value
    sent_bytes: int = 0  # what the clients alone would have sent

    def merge(self, other: Sums) -> None:
        self.sums.merge(other.sums)
        self.samples += other.samples
        self.clients += other.clients
        self.seconds += other.seconds
        self.collected.update(other.collected)
        self.failed.update(other.failed)
        self.add_metrics(other.metrics)
        self.sent_bytes += other.sent_bytes

    def add_metrics(self, metrics: Mapping[str, float], samples: int = 1) -> None:
        for name, value in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + samples * float(value)


@dataclass(frozen=True)
class RoundTask:
    """What is the same for all clients of a visit; a client's weight is its share of the cohort's totals."""

    round: int
    request: RoundRequest
    total_samples: int
    total_clients: int


class Device:
    def __init__(
        self, algorithm: Any, workspace: Workspace, clients: ClientData, loss: Loss, store: ClientStateStore | None,
        seed: int, reduction: str,
    ) -> None:  # fmt: skip
        self.algorithm, self.workspace, self.clients, self.loss = algorithm, workspace, clients, loss
        self.operators = algorithm.operators
        self.store, self.seed, self.reduction = store, seed, reduction

    def empty(self) -> Sums:
        return Sums(Accumulator(self.reduction))

    def train_list(self, task: RoundTask, clients: Sequence[int]) -> Sums:
        into = self.empty()
        for i, client in enumerate(clients):
            self.train(task, client, into, clients[i + 1] if i + 1 < len(clients) else None)
        return into

    def train(self, task: RoundTask, client: int, into: Sums, following: int | None = None) -> float:
        """Train one client and add its answer to the sums. Return the seconds it took.

        Of a client that fails nothing is added, and it keeps its state. The state of ``following`` is read meanwhile.
        """
        began = time.perf_counter()
        samples = self.clients.samples(client)
        if self.store is not None and following is not None:
            self.store.prefetch(following)
        try:
            context, result = self._run(task, client, samples)
            refusal = self._refusal(result)
        except Exception as error:
            refusal = f"{type(error).__name__}: {error}"
        if refusal:
            into.failed[client] = refusal
        else:
            self._add(task, context, result, into)
        took = time.perf_counter() - began
        into.seconds.append((client, samples, took))
        return took

    def _run(self, task: RoundTask, client: int, samples: int) -> tuple[ClientContext, ClientResult]:
        if samples < 1:
            raise ValueError(f"client {client} has {samples} samples; every client needs at least one")
        visit = task.request.name
        seed = client_seed(self.seed, task.round, visit, client)
        work, payload = self.workspace, task.request.payload
        state = self.store.get(client) if self.store is not None else None
        if state is not None and work.device.type != "cpu":
            state = {name: x.to(work.device) for name, x in state.items()}
        seed_everything(seed)
        data = to_device(self.clients.load(client), work.device)
        work.reset(payload.get("theta", work.x), payload[BUFFERS])
        context = ClientContext(client, samples, task.round, visit, seed, work.device, data, work, self.loss)
        result = self.algorithm.train(context, payload, state)
        if not isinstance(result, ClientResult):
            raise TypeError(f"train() must return a ClientResult, not {type(result).__name__}")
        return context, result

    def _refusal(self, result: ClientResult) -> str:
        """Return why a result cannot be used; "" if it can."""
        for name, value in result.reduce.items():
            operator = self.operators.get(name)
            if operator is None or not operator.summed:
                return f"the result names {name!r} under reduce, which is not a summed operator of the algorithm"
            if not isinstance(value, Tensor):
                return f"{name!r} is a {type(value).__name__}: reduce accepts only tensors"
            if tuple(value.shape) != (wanted := tuple(self.algorithm.shape_of(name))):
                return f"{name!r} has the shape {tuple(value.shape)}, but {wanted} was expected"
        if result.samples is not None and result.samples < 1:
            return f"it claims {result.samples} samples"
        if result.state is not None and self.store is None:
            return "it returns a state, but the algorithm is not marked `stateful = True`"
        for name in result.collect:
            operator = self.operators.get(name)
            if operator is None or operator.summed:
                return f"the result names {name!r} under collect, which is not a COLLECT of the algorithm"
        finite = all(all_finite(kind) for kind in (result.reduce, result.collect, result.state or {}))
        return "" if finite else "its result is not finite"

    @torch.no_grad()
    def _add(self, task: RoundTask, context: ClientContext, result: ClientResult, into: Sums) -> None:
        samples = context.samples if result.samples is None else result.samples
        mean = 1.0 / task.total_clients if self.algorithm.weights == "uniform" else samples / task.total_samples
        for name, value in result.reduce.items():
            into.sums.add(name, value, mean if self.operators[name] is WEIGHTED_MEAN else 1.0)
        if self.workspace.buffer_sizes:
            into.sums.add(BUFFERS, self.workspace.buffers_to_sum, mean)
        if result.collect:
            into.collected[context.client] = {name: x.detach().cpu().clone() for name, x in result.collect.items()}
        if result.state is not None and self.store is not None:
            self.store.put(context.client, result.state, task.round)
        into.samples += samples
        into.clients += 1
        sent = bytes_of([*result.reduce.values(), *result.collect.values()])
        into.sent_bytes += sent if result.sent_bytes is None else result.sent_bytes
        loss = context.mean_loss()
        into.add_metrics({**({} if loss is None else {"loss": loss}), **result.metrics}, samples)
