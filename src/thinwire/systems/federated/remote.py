"""Clients on other machines: the messages between a server and its nodes, and which of them are refused.

A node hosts some clients, trains the requested ones one after another, and answers with one sum, as a device does. A
message consists of tensors and JSON. How messages are transported is decided elsewhere (flower/).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.systems.federated.accumulate import Accumulator, all_finite
from thinwire.systems.federated.aggregator import facts as facts_of
from thinwire.systems.federated.device import BUFFERS, RoundTask, Sums
from thinwire.systems.federated.federation import Federation
from thinwire.systems.federated.history import History, RoundRecord
from thinwire.systems.federated.server import FederatedServer, evaluation_due, reduce
from thinwire.systems.federated.workspace import Workspace

logger = logging.getLogger("thinwire")
_MOST_BYTES = 2**31 - 2**20
_DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "exact": torch.int64}


@dataclass(frozen=True)
class NodeMessage:
    """A message between server and node.

    Attributes:
        tensors: by name.
        facts: a JSON object.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(x.numel() * x.element_size() for x in self.tensors.values())


class RefusedAnswer(ValueError):
    """A node's answer that is not used; the message says why."""


def check_noise(algorithm: Any) -> None:
    """Raise ``ValueError`` for noise that would hide nothing."""
    if getattr(getattr(algorithm, "inner", algorithm), "noise_multiplier", None) is not None:
        raise ValueError(
            "noise_multiplier= draws its noise from the run's seed, which the server knows, so it hides nothing: "
            "it is for simulations"
        )


class RemoteServer:
    """The server of a deployment, without I/O: messages out, messages in, one visit after another.

    Args:
        federation: what is trained. Its clients' data are not read, only the clients counted.
        hosts: node -> {client: samples}, as the nodes describe themselves.

    Attributes:
        history: of the completed rounds.
        round: the current one.

    Raises:
        ValueError: two nodes host one client, or one hosts a client that does not exist.
    """

    def __init__(self, federation: Federation, hosts: Mapping[int, Mapping[int, int]]) -> None:
        check_noise(federation.algorithm)
        self.federation = federation
        self.algorithm = federation.algorithm
        population = len(federation.clients)
        self._node_of: dict[int, int] = {}
        self._samples: dict[int, int] = {}
        for node, clients in sorted(hosts.items()):
            for client, samples in clients.items():
                if not 0 <= client < population:
                    raise ValueError(f"node {node} hosts client {client}, but there are only 0..{population - 1}")
                if client in self._node_of:
                    raise ValueError(f"nodes {self._node_of[client]} and {node} both host client {client}")
                if samples < 1:
                    raise ValueError(f"client {client} on node {node} has {samples} samples: leave it out")
                self._node_of[client], self._samples[client] = node, samples
        self._workspace = Workspace(federation.model)
        self.algorithm.setup(self._workspace.x.clone(), population, federation.clients_per_round)
        self.server = FederatedServer(self.algorithm, self._workspace.buffers, self._workspace.buffer_sizes)
        self.run = {**facts_of(self.algorithm), "seed": federation.seed, "reduction": federation.reduction}
        self.history = History(about={**self.run, "nodes": len(hosts), "clients": population})
        self.round = -1
        self.history.start = self._evaluated()
        self._accepted: dict[int, int] = {}
        self._begin_round()

    @property
    def done(self) -> bool:
        """Whether all rounds are over."""
        return self.round >= self.federation.rounds

    def outgoing(self) -> dict[int, NodeMessage]:
        """Return the current visit's messages, one for every node that has clients in the cohort.

        Raises:
            ValueError: a message would be too large.
        """
        assert self.server.request is not None
        request, self._sent_at = self.server.request, time.perf_counter()
        lists: dict[int, list[int]] = {}
        for client in self._cohort:
            if client in self._node_of:
                lists.setdefault(self._node_of[client], []).append(client)
        self._asked = lists
        messages = {}
        for node, clients in lists.items():
            facts = {
                "run": self.run,
                "round": self.round,
                "visit": request.name,
                "clients": clients,
                "total_samples": self._total,
                "total_clients": len(self._cohort),
                "accepted": self._accepted.get(node, -1),
            }
            messages[node] = NodeMessage(request.payload, facts)
            if messages[node].bytes > _MOST_BYTES:
                raise ValueError(f"a payload of {messages[node].bytes} bytes exceeds the 2 GiB that a message may have")
        self._down += sum(message.bytes for message in messages.values())
        return messages

    def incoming(self, answers: Mapping[int, NodeMessage | str]) -> RoundRecord | None:
        """Handle the nodes' answers (a str: why there is none). Return the round's record if the round is complete.

        Raises:
            AllClientsFailed: no client's answer could be used.
        """
        task = RoundTask(self.round, self.server.request, self._total, len(self._cohort))  # type: ignore[arg-type]
        total = Sums(Accumulator(self.federation.reduction))
        for client in self._cohort:
            if client not in self._node_of:
                total.failed[client] = "no node hosts it"
        for node in sorted(self._asked):
            answer = answers.get(node, "no answer in time")
            try:
                if isinstance(answer, str):
                    raise RefusedAnswer(answer)
                part = self._checked(node, answer, task)
                self._accepted[node] = self.round
                self._up += answer.bytes
                total.merge(part)
            except RefusedAnswer as error:
                logger.warning("round %s, node %s: %s", self.round, node, error)
                total.failed.update(dict.fromkeys(self._asked[node], f"node {node}: {error}"))
        for node in sorted(set(answers) - set(self._asked)):
            logger.warning("node %s answered in round %s without being asked; its answer is not used", node, self.round)
        with torch.no_grad():
            reduced = reduce(total, task, self.algorithm, self._workspace.dtype)
        self._failed.update(total.failed)
        self._client_bytes += total.sent_bytes
        seconds = time.perf_counter() - self._sent_at
        self._seconds.append(seconds)
        self.server.deliver(reduced)
        if self.server.request is not None:
            return None
        record = RoundRecord(
            round=self.round,
            clients=reduced.clients,
            samples=reduced.samples,
            failed=dict(sorted(self._failed.items())),
            metrics=dict(reduced.metrics),
            evaluation=self._evaluated(),
            seconds=sum(self._seconds),
            device_seconds=sum(self._seconds),
            predicted_seconds=None,
            schedule="hosts",
            busy_seconds=(),
            client_seconds=None,
            bytes_up=self._up,
            bytes_down=self._down,
            control_bytes=0,
            client_bytes=self._client_bytes,
        )
        self.history.add(record)
        self._begin_round()
        return record

    def finish(self) -> None:
        """Write the weights into the federation's model."""
        self._workspace.write_to(self.federation.model, self.algorithm.theta, self.server.buffers)

    def _begin_round(self) -> None:
        self.round += 1
        self._failed: dict[int, str] = {}
        self._seconds: list[float] = []
        self._up = self._down = self._client_bytes = 0
        if self.done:
            return
        population = len(self.federation.clients)
        asked = self.federation.clients_per_round, self.federation.seed
        self._cohort = self.server.cohort(self.round, population, *asked)
        self._total = sum(self._samples.get(client, 0) for client in self._cohort)
        if not self._total:
            raise ValueError(f"no node hosts any client of round {self.round}: start more nodes")
        self.server.begin(self.round)

    def _evaluated(self) -> dict[str, float]:
        """Return the user's evaluation, if it is due."""
        made = self.federation
        if made.evaluate is None or not evaluation_due(self.round, made.rounds, made.evaluate_every):
            return {}
        return self._workspace.evaluated(self.algorithm.theta, self.server.buffers, made.evaluate, self.round)

    def _checked(self, node: int, answer: NodeMessage, task: RoundTask) -> Sums:
        """Check a node's sum and return it.

        Raises:
            RefusedAnswer: it names clients that were not requested, has the wrong shape or kind, or is not finite.
        """
        if "error" in answer.facts:
            raise RefusedAnswer(str(answer.facts["error"]))
        try:
            failed = {int(client): str(why) for client, why in answer.facts["failed"].items()}
            trained = [(int(c), int(n), float(t)) for c, n, t in answer.facts["seconds"]]
            metrics = {str(name): float(value) for name, value in answer.facts["metrics"].items()}
            bounds = {str(name): float(value) for name, value in answer.facts["bounds"].items()}
            sent = int(answer.facts["sent_bytes"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RefusedAnswer(f"its answer is not in thinwire's format: {error!r}") from error
        asked = self._asked[node]
        if unknown := sorted(({c for c, _, _ in trained} | set(failed)) - set(asked)):
            raise RefusedAnswer(f"it answers for client {unknown[0]}, which it was not asked for")
        if sorted(c for c, _, _ in trained) != sorted(asked):
            raise RefusedAnswer(f"it was asked for {len(asked)} clients and reports {len(trained)}")
        good = [c for c in asked if c not in failed]
        sums = Sums(Accumulator(self.federation.reduction))
        prefix = "collected/"
        summed = {name: x for name, x in answer.tensors.items() if not name.startswith(prefix)}
        for name, x in summed.items():
            self._check_tensor(name, x)
        if not all_finite(answer.tensors):
            raise RefusedAnswer("its sum is not finite")
        sums.sums.sums.update(summed)
        sums.sums.bounds.update({name: bounds.get(name, float("inf")) for name in summed})
        for key, x in answer.tensors.items():
            if key.startswith(prefix):
                client, _, name = key[len(prefix) :].partition("/")
                if not client.isdecimal() or int(client) not in good or name not in self.algorithm.operators:
                    raise RefusedAnswer(f"it answers with {key!r}, which nobody asked for")
                sums.collected.setdefault(int(client), {})[name] = x
        sums.samples, sums.clients = sum(self._samples[c] for c in good), len(good)
        sums.seconds, sums.failed, sums.metrics, sums.sent_bytes = trained, failed, metrics, sent
        return sums

    def _check_tensor(self, name: str, x: Tensor) -> None:
        operator = self.algorithm.operators.get(name)
        if name != BUFFERS and (operator is None or not operator.summed):
            raise RefusedAnswer(f"it answers with {name!r}, which nobody asked for")
        of_buffers = (self.server.buffers.numel() + len(self.server.sizes),)
        wanted: Sequence[int] = of_buffers if name == BUFFERS else self.algorithm.shape_of(name)
        if tuple(x.shape) != tuple(wanted):
            raise RefusedAnswer(f"{name!r} has the shape {tuple(x.shape)}, but {tuple(wanted)} was expected")
        if x.dtype != _DTYPES[self.federation.reduction]:
            raise RefusedAnswer(f"{name!r} is {x.dtype}, but reduction={self.federation.reduction!r} was asked for")
