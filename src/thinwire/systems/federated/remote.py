"""Clients on other machines: a server and its nodes, the messages between them, and which of those are refused.

A node hosts some clients, trains the requested ones one after another, and answers with one sum, as a device does.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.core.checks import local_path
from thinwire.core.durable import write_whole
from thinwire.systems.federated.aggregator import RoundRequest, facts_of
from thinwire.systems.federated.device import (
    BUFFERS,
    REDUCTIONS,
    Accumulator,
    Device,
    RoundTask,
    Sums,
    all_finite,
    bytes_of,
    generators_kept,
)
from thinwire.systems.federated.history import History, RoundRecord
from thinwire.systems.federated.server import FederatedServer, evaluation_due, reduce
from thinwire.systems.federated.simulate import Federation
from thinwire.systems.federated.state import ClientStateStore, pack, unpack
from thinwire.systems.federated.workspace import Workspace

logger = logging.getLogger("thinwire")
_MOST_BYTES = 2**31 - 2**20
_COLLECTED = "collected/"
_VERSIONS, _PENDING = "versions.safetensors", "pending.json"


@dataclass(frozen=True)
class NodeMessage:
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)


class RefusedAnswer(ValueError):
    """A node's answer that is not used; the message says why."""


def run_facts(federation: Federation) -> dict[str, Any]:
    """Return what server and nodes must have in common; refuse noise that would hide nothing."""
    algorithm = federation.algorithm
    if getattr(getattr(algorithm, "inner", algorithm), "noise_multiplier", None) is not None:
        raise ValueError(
            "noise_multiplier= draws its noise from the run's seed, which the server knows, so it hides nothing: "
            "it is for simulations"
        )
    return {**facts_of(algorithm), "seed": federation.seed, "reduction": federation.reduction}


class RemoteServer:
    """The server of a deployment, without I/O; ``hosts``: node -> {client: samples}, as the nodes describe themselves.

    Of its own federation's clients only the number is used.
    """

    def __init__(self, federation: Federation, hosts: Mapping[int, Mapping[int, int]]) -> None:
        self.run = run_facts(federation)
        self.federation, self.algorithm = federation, federation.algorithm
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
        self.round = -1
        about = {**self.run, "nodes": len(hosts), "clients": population}
        self.history = History([], self._evaluated(), about)
        self._accepted: dict[int, int] = {}
        self._begin_round()

    @property
    def done(self) -> bool:
        return self.round >= self.federation.rounds

    def outgoing(self) -> dict[int, NodeMessage]:
        assert self.server.request is not None
        request, self._sent_at = self.server.request, time.perf_counter()
        self._asked: dict[int, list[int]] = {}
        for client in self._cohort:
            if client in self._node_of:
                self._asked.setdefault(self._node_of[client], []).append(client)
        size = bytes_of(request.payload.values())
        if size > _MOST_BYTES:
            raise ValueError(f"a payload of {size} bytes exceeds the 2 GiB that a message may have")
        self._down += size * len(self._asked)
        common = {
            "run": self.run, "round": self.round, "visit": request.name, "total_samples": self._total,
            "total_clients": len(self._cohort),
        }  # fmt: skip
        return {
            node: NodeMessage(request.payload, {**common, "clients": asked, "accepted": self._accepted.get(node, -1)})
            for node, asked in self._asked.items()
        }

    def incoming(self, answers: Mapping[int, NodeMessage | str]) -> RoundRecord | None:
        """Handle the nodes' answers (a str: why there is none). Return the round's record if the round is complete."""
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
                part = self._checked(node, answer)
                self._accepted[node] = self.round
                self._up += bytes_of(answer.tensors.values())
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
        self._seconds += time.perf_counter() - self._sent_at
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
            seconds=self._seconds,
            device_seconds=self._seconds,
            schedule="hosts",
            bytes_up=self._up,
            bytes_down=self._down,
            client_bytes=self._client_bytes,
        )
        self.history.add(record)
        self._begin_round()
        return record

    def finish(self) -> None:
        self._workspace.write_to(self.federation.model, self.algorithm.theta, self.server.buffers)

    def _begin_round(self) -> None:
        self.round += 1
        self._failed: dict[int, str] = {}
        self._seconds = 0.0
        self._up = self._down = self._client_bytes = 0
        if self.done:
            return
        made = self.federation
        self._cohort = self.server.cohort(self.round, len(made.clients), made.clients_per_round, made.seed)
        self._total = sum(self._samples.get(client, 0) for client in self._cohort)
        if not self._total:
            raise ValueError(f"no node hosts any client of round {self.round}: start more nodes")
        self.server.begin(self.round)

    def _evaluated(self) -> dict[str, float]:
        made = self.federation
        if made.evaluate is None or not evaluation_due(self.round, made.rounds, made.evaluate_every):
            return {}
        return self._workspace.evaluated(self.algorithm.theta, self.server.buffers, made.evaluate, self.round)

    def _checked(self, node: int, answer: NodeMessage) -> Sums:
        """Return a node's sum; refuse clients that were not requested, wrong shapes, and what is not finite."""
        if "error" in answer.facts:
            raise RefusedAnswer(str(answer.facts["error"]))
        sums = Sums(Accumulator(self.federation.reduction))
        try:
            sums.failed = {int(client): str(why) for client, why in answer.facts["failed"].items()}
            sums.seconds = [(int(c), int(n), float(t)) for c, n, t in answer.facts["seconds"]]
            sums.metrics = {str(name): float(value) for name, value in answer.facts["metrics"].items()}
            bounds = {str(name): float(value) for name, value in answer.facts["bounds"].items()}
            sums.sent_bytes = int(answer.facts["sent_bytes"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RefusedAnswer(f"its answer is not in thinwire's format: {error!r}") from error
        asked, trained = self._asked[node], [client for client, _, _ in sums.seconds]
        if unknown := sorted({*trained, *sums.failed} - set(asked)):
            raise RefusedAnswer(f"it answers for client {unknown[0]}, which it was not asked for")
        if sorted(trained) != sorted(asked):
            raise RefusedAnswer(f"it was asked for {len(asked)} clients and reports {len(trained)}")
        good = [client for client in asked if client not in sums.failed]
        for key, x in answer.tensors.items():
            if not key.startswith(_COLLECTED):
                self._check_tensor(key, x)
                sums.sums.sums[key], sums.sums.bounds[key] = x, bounds.get(key, float("inf"))
                continue
            client, _, name = key.removeprefix(_COLLECTED).partition("/")
            if not client.isdecimal() or int(client) not in good or name not in self.algorithm.operators:
                raise RefusedAnswer(f"it answers with {key!r}, which nobody asked for")
            sums.collected.setdefault(int(client), {})[name] = x
        if not all_finite(answer.tensors):
            raise RefusedAnswer("its sum is not finite")
        sums.samples, sums.clients = sum(self._samples[client] for client in good), len(good)
        return sums

    def _check_tensor(self, name: str, x: Tensor) -> None:
        operator = self.algorithm.operators.get(name)
        if name != BUFFERS and (operator is None or not operator.summed):
            raise RefusedAnswer(f"it answers with {name!r}, which nobody asked for")
        of_buffers = (self.server.buffers.numel() + len(self.server.sizes),)
        wanted: Sequence[int] = of_buffers if name == BUFFERS else self.algorithm.shape_of(name)
        if tuple(x.shape) != tuple(wanted):
            raise RefusedAnswer(f"{name!r} has the shape {tuple(x.shape)}, but {tuple(wanted)} was expected")
        if x.dtype != REDUCTIONS[self.federation.reduction]:
            raise RefusedAnswer(f"{name!r} is {x.dtype}, but reduction={self.federation.reduction!r} was asked for")


class RemoteNode:
    """Trains the clients that it hosts. All state is in its ``folder``: the next message may reach a new process."""

    def __init__(self, federation: Federation, clients: Sequence[int], folder: str | Path) -> None:
        self._run = run_facts(federation)
        population = len(federation.clients)
        if strange := [client for client in clients if not 0 <= client < population]:
            raise ValueError(f"this node is asked to host client {strange[0]}, but there are only 0..{population - 1}")
        self.federation, self.clients, self._folder = federation, sorted(set(clients)), local_path(folder)

    def describe(self) -> NodeMessage:
        return NodeMessage(facts={"clients": [[c, self.federation.clients.samples(c)] for c in self.clients]})

    def answer(self, message: NodeMessage) -> NodeMessage:
        """Train the requested clients. If the message is wrong, the answer says why, under "error"."""
        try:
            self._check(message.facts)
            with generators_kept():
                return self._train(message)
        except (KeyError, TypeError, ValueError, OSError) as error:
            return NodeMessage(facts={"error": f"{type(error).__name__}: {error}"})

    def _check(self, facts: Mapping[str, Any]) -> None:
        for key, value in self._run.items():
            if facts["run"].get(key) != value:
                raise ValueError(
                    f"this node's federation has {key} = {value}, the server's {facts['run'].get(key)}: "
                    "both must be built by the same code"
                )
        if strange := [client for client in facts["clients"] if client not in set(self.clients)]:
            raise ValueError(f"client {strange[0]} is not hosted here")

    def _train(self, message: NodeMessage) -> NodeMessage:
        facts, made = message.facts, self.federation
        algorithm, round = made.algorithm, int(facts["round"])
        workspace = Workspace(made.model)
        algorithm.setup(workspace.x.clone(), len(made.clients), made.clients_per_round)
        store = self._states(round, int(facts["accepted"])) if algorithm.stateful else None
        device = Device(algorithm, workspace, made.clients, made.loss, store, made.seed, made.reduction)
        payload = {name: x.to(workspace.device) for name, x in message.tensors.items()}
        request = RoundRequest(payload, str(facts["visit"]))
        task = RoundTask(round, request, int(facts["total_samples"]), int(facts["total_clients"]))
        sums = device.train_list(task, [int(client) for client in facts["clients"]])
        if store is not None:
            clients = store.prepare()
            store.close()
            self._note(round, clients)
        tensors = {name: x.cpu() for name, x in sums.sums.sums.items()}
        for client, row in sums.collected.items():
            tensors.update({f"{_COLLECTED}{client}/{name}": x for name, x in row.items()})
        said = {name: getattr(sums, name) for name in ("seconds", "metrics", "sent_bytes")}
        failed = {str(client): why for client, why in sums.failed.items()}
        return NodeMessage(tensors, {**said, "failed": failed, "bounds": sums.sums.bounds})

    def _states(self, round: int, accepted: int) -> ClientStateStore:
        """Return the states as of the last round that the server has used; discard everything newer."""
        self._folder.mkdir(parents=True, exist_ok=True)
        store = ClientStateStore(len(self.federation.clients), self._folder, write_through=True)
        path = self._folder / _VERSIONS
        versions = torch.from_numpy(store.versions.copy())
        if path.exists():
            versions = unpack(path.read_bytes())["versions"]
        pending = self._pending()
        later_visit = pending is not None and pending[0] == round
        if pending is not None and not later_visit:
            if pending[0] <= accepted:
                versions[torch.tensor(pending[1], dtype=torch.int64)] = pending[0]
                write_whole(path, pack({"versions": versions}), shared=True)
            (self._folder / _PENDING).unlink()
        store.begin(versions, durable=False, clean=not later_visit)
        return store

    def _pending(self) -> tuple[int, list[int]] | None:
        path = self._folder / _PENDING
        if not path.exists():
            return None
        found = json.loads(path.read_text())
        return int(found["round"]), [int(client) for client in found["clients"]]

    def _note(self, round: int, clients: Sequence[int]) -> None:
        """Record the clients trained in this round, in all visits so far; they count once the server says so."""
        before = self._pending()
        known = set(before[1]) if before is not None and before[0] == round else set()
        noted = json.dumps({"round": round, "clients": sorted(known | set(clients))})
        write_whole(self._folder / _PENDING, noted, shared=True)
