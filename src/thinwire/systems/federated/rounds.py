"""One run, round by round: visits through a back end, the record, evaluation, the checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from thinwire.systems.federated import checkpoint as checkpoints
from thinwire.systems.federated.allreduce import AllReduceBackend
from thinwire.systems.federated.backend import VisitReport
from thinwire.systems.federated.clocks import ClientTrace
from thinwire.systems.federated.device import BUFFERS, Device, RoundTask
from thinwire.systems.federated.history import History, RoundRecord
from thinwire.systems.federated.inprocess import InProcess
from thinwire.systems.federated.server import FederatedServer, reduce

_HASH_EVERY = 100  # rounds


class Run:
    """The state of a run, from round to round."""

    def __init__(
        self,
        server: FederatedServer,
        back: InProcess | AllReduceBackend,
        device: Device,
        facts: Mapping[str, Any],
        folder: Path | None,
        rank: int,
    ) -> None:
        self.server, self.back, self.device, self.facts, self.folder, self.rank = (
            server, back, device, facts, folder, rank,
        )  # fmt: skip
        self.history = History()

    def resume(self, comm: Any) -> int:
        """Load the checkpoint, if there is one. Return the round to begin with."""
        store = self.device.store
        found = None if self.folder is None else checkpoints.load(self.folder, self.facts)
        if comm is not None:  # all ranks must see the same folder
            comm.agree({"the checkpoint's next round": 0 if found is None else found.round})
        if store is not None:
            versions = None if found is None else found.versions
            if found is not None and (versions is None or versions.numel() != store.population):
                raise ValueError(f"{self.folder} contains no client states that fit: give another folder")
            store.begin(versions, durable=self.folder is not None, clean=self.rank == 0)
        if found is None:
            return 0
        self.server.restore(found.server)
        self.history = found.history
        return found.round

    def round(self, round: int, clients_per_round: int, seed: int, trace: ClientTrace | None) -> RoundRecord:
        """Run all visits of a round, and commit it."""
        began = time.perf_counter()
        algorithm, server, device = self.server.algorithm, self.server, self.device
        population = device.clients
        chosen = server.cohort(round, len(population), clients_per_round, seed)
        total = sum(population.samples(client) for client in chosen)
        reports: list[VisitReport] = []
        server.begin(round)
        reduced = None
        client_seconds = 0.0
        while server.request is not None:
            task = RoundTask(round, server.request, total, len(chosen))
            report = self.back.visit(task, chosen)
            with torch.no_grad():
                reduced = reduce(report.sums, task, algorithm, device.workspace.dtype)
            if trace is not None:
                passes = getattr(algorithm, "epochs", 1)
                each = report.sums.sent_bytes // max(1, report.sums.clients)
                work = [(client, population.samples(client) * passes, each) for client in chosen]
                client_seconds += trace.round_seconds(work, _bytes(server.request.payload))
            reports.append(report)
            server.deliver(reduced)
        if reduced is None:
            raise ValueError("program() must yield at least one RoundRequest")
        self.back.commit(round)
        if isinstance(self.back, AllReduceBackend) and round % _HASH_EVERY == 0:
            self.back.check_state(round, server.state())
        predictions = [report.predicted_seconds for report in reports]
        return RoundRecord(
            round=round,
            clients=reduced.clients,
            samples=reduced.samples,
            failed={client: why for report in reports for client, why in sorted(report.sums.failed.items())},
            metrics=dict(reduced.metrics),
            evaluation={},
            seconds=time.perf_counter() - began,
            device_seconds=sum(report.device_seconds for report in reports),
            predicted_seconds=None if None in predictions else sum(p for p in predictions if p is not None),
            schedule=" ".join(report.schedule for report in reports),
            busy_seconds=tuple(map(sum, zip(*(report.busy_seconds for report in reports)))),
            client_seconds=None if trace is None else client_seconds,
            bytes_up=sum(report.bytes_up for report in reports),
            bytes_down=sum(report.bytes_down for report in reports),
            control_bytes=sum(report.control_bytes for report in reports),
            client_bytes=sum(report.sums.sent_bytes for report in reports),
            lost_devices=tuple(lost for report in reports for lost in report.lost_devices),
        )

    def save(self, round: int, comm: Any) -> None:
        """Write the checkpoint. All ranks call this, and wait until it is complete.

        Raises:
            OSError: on all ranks, if one of them could not write.
        """
        store = self.device.store
        with self._together(round, comm):  # afterwards all states are on disk
            if store is not None:
                store.flush()
        assert self.folder is not None
        with self._together(round, comm):
            if self.rank == 0:
                versions = None if store is None else torch.from_numpy(store.versions)
                checkpoints.save(self.folder, round, self.server.state(), versions, self.history, self.facts)
        if store is not None:
            store.durable()

    @contextmanager
    def _together(self, round: int, comm: Any) -> Iterator[None]:
        cause, mine = None, b""
        try:
            yield
        except OSError as error:
            cause, mine = error, str(error).encode()
        everyones = [mine] if comm is None else comm.gather(mine)
        said = [f"rank {rank}: {text.decode()}" for rank, text in enumerate(everyones) if text]
        if said:
            raise OSError(f"no checkpoint of round {round} was written in {self.folder}: {'; '.join(said)}") from cause


def _bytes(payload: Mapping[str, Any]) -> int:
    return sum(x.numel() * x.element_size() for name, x in payload.items() if name != BUFFERS or x.numel())
