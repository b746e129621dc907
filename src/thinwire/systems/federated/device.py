"""A device: trains one client after another, adds up their answers, and keeps nothing of any client.

Everything that a client could leave behind is reset before the next one: weights, buffers, frozen parameters,
gradients, and the generators of torch, numpy and Python. The executor makes a new optimizer for every client.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from thinwire.systems.federated.accumulate import Accumulator, all_finite
from thinwire.systems.federated.aggregator import WEIGHTED_MEAN, Operator, RoundRequest
from thinwire.systems.federated.client import ClientContext, ClientExecutor, ClientResult, Loss
from thinwire.systems.federated.cohort import client_seed, seed_everything
from thinwire.systems.federated.data import ClientData, to_device
from thinwire.systems.federated.state import ClientStateStore
from thinwire.systems.federated.workspace import Workspace

BUFFERS = "buffers"
"""The name under which floating-point buffers are sent; they are averaged like weights."""


@dataclass
class Sums:
    """What one device reports: sums of its clients' answers, and facts about the clients.

    Attributes:
        sums: by name.
        samples, clients: totals over the clients that answered.
        seconds: (client, samples, seconds) of all clients, in order; includes loading of data and state.
        collected: by client, then by name.
        failed: client -> reason.
        metrics: sums of samples times value. sent_bytes: what the clients alone would have sent.
    """

    sums: Accumulator
    samples: int = 0
    clients: int = 0
    seconds: list[tuple[int, int, float]] = field(default_factory=list)
    collected: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    sent_bytes: int = 0

    def merge(self, other: Sums) -> None:
        self.sums.merge(other.sums)
        self.samples += other.samples
        self.clients += other.clients
        self.seconds += other.seconds
        self.collected.update(other.collected)
        self.failed.update(other.failed)
        for name, value in other.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value
        self.sent_bytes += other.sent_bytes


@dataclass(frozen=True)
class RoundTask:
    """What is the same for all clients of a visit.

    Attributes:
        round, request: of the visit.
        total_samples, total_clients: of the whole cohort; a client's weight is its share of these.
    """

    round: int
    request: RoundRequest
    total_samples: int
    total_clients: int


class Device:
    """One model that trains one client at a time.

    Args:
        algorithm: the executor, with its ``operators`` and ``weights``.
        workspace: holds the model.
        clients: the population.
        loss: of a batch.
        store: of the clients' states; None if the algorithm keeps none.
        seed: of the run.
        reduction: the arithmetic of the sums.
    """

    def __init__(
        self,
        algorithm: Any,
        workspace: Workspace,
        clients: ClientData,
        loss: Loss,
        store: ClientStateStore | None,
        seed: int,
        reduction: str,
    ) -> None:
        self.algorithm, self.executor = algorithm, cast(ClientExecutor, algorithm)
        self.operators: Mapping[str, Operator] = algorithm.operators
        self.uniform = algorithm.weights == "uniform"
        self.workspace, self.clients, self.loss = workspace, clients, loss
        self.store, self.seed, self.reduction = store, seed, reduction

    def empty(self) -> Sums:
        return Sums(Accumulator(self.reduction))

    def train(self, task: RoundTask, client: int, into: Sums, following: int | None = None) -> float:
        """Train one client and add its answer to the sums. Return the seconds it took.

        A client that raises an error, or whose answer is not finite or not what was requested, is recorded as failed:
        nothing of it is added, and it keeps its old state.

        Args:
            task: the visit.
            client: its id.
            into: the sums.
            following: the next client, whose state is read in the meantime.
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
            self._add(task, client, samples, context, result, into)
        took = time.perf_counter() - began
        into.seconds.append((client, samples, took))
        return took

    def _run(self, task: RoundTask, client: int, samples: int) -> tuple[ClientContext, ClientResult]:
        if samples < 1:
            raise ValueError(f"client {client} has {samples} samples; every client needs at least one")
        seed = client_seed(self.seed, task.round, task.request.name, client)
        work, payload = self.workspace, task.request.payload
        state = self.store.get(client) if self.store is not None else None
        if state is not None and work.device.type != "cpu":
            state = {name: x.to(work.device) for name, x in state.items()}
        seed_everything(seed)
        data = to_device(self.clients.load(client), work.device)
        work.reset(payload.get("theta", work.x), payload[BUFFERS])
        context = ClientContext(
            client, samples, task.round, task.request.name, seed, work.device, data, work, self.loss
        )
        result = self.executor.train(context, payload, state)
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
            if tuple(value.shape) != tuple(self.algorithm.shape_of(name)):
                wanted = tuple(self.algorithm.shape_of(name))
                return f"{name!r} has the shape {tuple(value.shape)}, but {wanted} was expected"
        if result.samples is not None and result.samples < 1:
            return f"it claims {result.samples} samples"
        if result.state is not None and self.store is None:
            return "it returns a state, but the algorithm is not marked `stateful = True`"
        for name in result.collect:
            operator = self.operators.get(name)
            if operator is None or operator.summed:
                return f"the result names {name!r} under collect, which is not a COLLECT of the algorithm"
        for kind in (result.reduce, result.collect, result.state or {}):
            if not all_finite(kind):
                return "its result is not finite"
        return ""

    @torch.no_grad()
    def _add(
        self, task: RoundTask, client: int, samples: int, context: ClientContext, result: ClientResult, into: Sums
    ) -> None:
        if result.samples is not None:
            samples = result.samples
        mean = 1.0 / task.total_clients if self.uniform else samples / task.total_samples
        for name, value in result.reduce.items():
            into.sums.add(name, value, mean if self.operators[name] is WEIGHTED_MEAN else 1.0)
        if self.workspace.buffer_sizes:
            into.sums.add(BUFFERS, self.workspace.buffers_to_sum, mean)
        if result.collect:
            into.collected[client] = {name: x.detach().cpu().clone() for name, x in result.collect.items()}
        if result.state is not None and self.store is not None:
            self.store.put(client, result.state, task.round)
        into.samples += samples
        into.clients += 1
        sent = _bytes([*result.reduce.values(), *result.collect.values()])
        into.sent_bytes += sent if result.sent_bytes is None else result.sent_bytes
        metrics = dict(result.metrics)
        if (loss := context.mean_loss()) is not None:
            metrics.setdefault("loss", loss)
        for name, number in metrics.items():
            into.metrics[name] = into.metrics.get(name, 0.0) + samples * float(number)


def _bytes(tensors: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def run_list(device: Device, task: RoundTask, clients: Sequence[int], into: Sums) -> None:
    """Train clients one after another."""
    for i, client in enumerate(clients):
        device.train(task, client, into, clients[i + 1] if i + 1 < len(clients) else None)
