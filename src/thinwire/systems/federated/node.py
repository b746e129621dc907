"""A node of a deployment: some clients, their states on its disk, and one sum as the answer to every message."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.core.durable import write_whole
from thinwire.systems.federated import files
from thinwire.systems.federated.aggregator import RoundRequest
from thinwire.systems.federated.aggregator import facts as facts_of
from thinwire.systems.federated.cohort import generators_kept
from thinwire.systems.federated.device import Device, RoundTask, run_list
from thinwire.systems.federated.federation import Federation
from thinwire.systems.federated.remote import NodeMessage, check_noise
from thinwire.systems.federated.state import ClientStateStore
from thinwire.systems.federated.workspace import Workspace

_VERSIONS, _PENDING = "versions.safetensors", "pending.json"


class RemoteNode:
    """Trains the clients that it hosts. All lasting state is on disk: the next message may reach a new process.

    Args:
        federation: as on the server; only the data of this node's clients are loaded.
        clients: the clients that it hosts.
        folder: for their states; used only by this node and this run.

    Raises:
        ValueError: a client does not exist.
    """

    def __init__(self, federation: Federation, clients: Sequence[int], folder: str | Path) -> None:
        check_noise(federation.algorithm)
        population = len(federation.clients)
        if strange := [client for client in clients if not 0 <= client < population]:
            raise ValueError(f"this node is asked to host client {strange[0]}, but there are only 0..{population - 1}")
        self.federation, self.clients, self._folder = federation, sorted(set(clients)), Path(folder)
        self._run = {
            **facts_of(federation.algorithm), "seed": federation.seed, "reduction": federation.reduction,
        }  # fmt: skip

    def describe(self) -> NodeMessage:
        """Return its clients and their numbers of samples."""
        return NodeMessage(facts={"clients": [[c, self.federation.clients.samples(c)] for c in self.clients]})

    def answer(self, message: NodeMessage) -> NodeMessage:
        """Train the requested clients. If the message is wrong, the answer says why, under "error"."""
        facts = message.facts
        try:
            self._check(facts)
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
        algorithm = made.algorithm
        workspace = Workspace(made.model)
        algorithm.setup(workspace.x.clone(), len(made.clients), made.clients_per_round)
        store = self._states(int(facts["round"]), int(facts["accepted"])) if algorithm.stateful else None
        device = Device(algorithm, workspace, made.clients, made.loss, store, made.seed, made.reduction)
        payload = {name: x.to(workspace.device) for name, x in message.tensors.items()}
        request = RoundRequest(payload, str(facts["visit"]))
        task = RoundTask(int(facts["round"]), request, int(facts["total_samples"]), int(facts["total_clients"]))
        into = device.empty()
        run_list(device, task, [int(client) for client in facts["clients"]], into)
        if store is not None:
            clients = store.prepare()
            store.close()
            self._note(task.round, clients)
        tensors: dict[str, Tensor] = {name: x.cpu() for name, x in into.sums.sums.items()}
        for client, row in into.collected.items():
            tensors.update({f"collected/{client}/{name}": x for name, x in row.items()})
        return NodeMessage(
            tensors,
            {
                "seconds": into.seconds,
                "failed": {str(client): why for client, why in into.failed.items()},
                "metrics": into.metrics,
                "bounds": into.sums.bounds,
                "sent_bytes": into.sent_bytes,
            },
        )

    def _states(self, round: int, accepted: int) -> ClientStateStore:
        """Return the states as of the last round that the server has used; discard everything newer."""
        self._folder.mkdir(parents=True, exist_ok=True)
        store = ClientStateStore(len(self.federation.clients), self._folder, write_through=True)
        path = self._folder / _VERSIONS
        versions = torch.from_numpy(store.versions.copy())
        if path.exists():
            versions = files.unpack(path.read_bytes())["versions"]
        pending = self._pending()
        later_visit = pending is not None and pending[0] == round
        if pending is not None and not later_visit:
            if pending[0] <= accepted:
                versions[torch.tensor(pending[1], dtype=torch.int64)] = pending[0]
                write_whole(path, files.pack({"versions": versions}), shared=True)
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
