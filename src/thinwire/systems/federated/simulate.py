"""``simulate``: train many clients on few devices, round by round. A ``Federation`` is all that defines such a run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thinwire.core.checks import check_choice, check_count, local_path
from thinwire.systems.federated.aggregator import Loss, cross_entropy, facts_of
from thinwire.systems.federated.backends import AllReduceBackend, InProcess, VisitReport, join
from thinwire.systems.federated.clocks import ClientTrace, Speed, check_cohort
from thinwire.systems.federated.data import ClientData
from thinwire.systems.federated.device import Device, RoundTask, bytes_of, generators_kept
from thinwire.systems.federated.history import Checkpoint, History, RoundRecord
from thinwire.systems.federated.schedule import Planner
from thinwire.systems.federated.server import FederatedServer, evaluation_due, reduce
from thinwire.systems.federated.state import ClientStateStore
from thinwire.systems.federated.workspace import Evaluate, Workspace

_HASH_EVERY = 100  # rounds


def simulate(
    algorithm: Any,
    model: nn.Module,
    clients: ClientData,
    *,
    rounds: int,
    clients_per_round: int,
    loss: Loss = cross_entropy,
    devices: int | None = None,
    backend: str = "auto",
    schedule: str = "auto",
    reduction: str = "fp64",
    seed: int = 0,
    state: ClientStateStore | str | os.PathLike[str] | None = None,
    evaluate: Evaluate | None = None,
    evaluate_every: int | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 1,
    warmup_rounds: int = 2,
    speeds: Sequence[Speed] | None = None,
    trace: ClientTrace | None = None,
    faults: Mapping[tuple[int, int], float] | None = None,
    on_round: Callable[[RoundRecord], None] | None = None,
    timeout: float | None = None,
) -> History:
    """Train a model over a population of clients.

    The result depends on the seed and the data, but not on the number of devices, the schedule or the back end: bit for
    bit with ``reduction="exact"``, otherwise up to the last digits.

    Args:
        algorithm: an executor and aggregator in one, such as :class:`~thinwire.federated.FedAvg`.
        model: with the initial weights; at the end it holds the trained weights.
        clients: the population.
        rounds: in total; a resumed run continues up to this number.
        clients_per_round: drawn uniformly, without replacement.
        loss: (model, batch) -> mean loss; by default the cross-entropy of ``(inputs, classes)``.
        devices: how many the in-process back end emulates, each with its own clock; else the number of ranks.
        backend: "inprocess", "ranks" (one device per rank of the default process group), or "auto": ranks if there is a
            process group.
        schedule: "equal", "lpt", "pull" or "auto"; see :mod:`~thinwire.federated.schedule`.
        reduction: "fp32", "fp64" or "exact"; see :mod:`~thinwire.federated.device`.
        seed: for cohorts and clients.
        state: where the clients' states are kept: a folder or a store; None: next to the checkpoint, or in a temporary
            folder.
        evaluate: (model in eval mode, round) -> numbers, on rank 0.
        evaluate_every: in rounds; also before the first and after the last one. None: at most 20 times in a run; 0:
            only after the last round.
        checkpoint_dir: a folder; a run that finds a checkpoint in it continues from there.
        checkpoint_every: in rounds; also after the last one.
        warmup_rounds: dealt out equally, for the fits that ``lpt`` uses.
        speeds: of the in-process devices: their clock, instead of measured seconds.
        trace: of the clients' own devices, for ``client_seconds`` in the history.
        faults: (round, device) -> seconds after which an in-process device is lost, to test such a loss.
        on_round: called with every round's record.
        timeout: seconds after which a silent rank causes an error; None: torch's default.

    Returns:
        The history; on ranks other than 0 without evaluations.

    Raises:
        ValueError: an option is invalid, a round has more clients than there are, or the checkpoint is of another run.
        NotLinear: the algorithm uses a rule that sums cannot express.
        DeviceLost: a rank is gone.
        AllClientsFailed: all clients of a round failed.
        OverflowError: a sum left the range of ``reduction="exact"``.
    """
    check_numbers(rounds, clients_per_round, len(clients), evaluate_every, checkpoint_every)
    ranks = use_ranks(backend, devices, speeds, faults)
    workspace = Workspace(model)
    rank, comm = 0, None
    if ranks:
        comm = join(workspace.device, timeout)
        rank = comm.rank
    count = devices or 1 if comm is None else comm.control.size
    planner = Planner(schedule, count, seed, warmup_rounds)
    given = {
        **facts_of(algorithm), "clients": len(clients), "clients_per_round": clients_per_round, "seed": seed,
        "reduction": reduction,
    }  # fmt: skip
    broken = True
    store: ClientStateStore | None = None
    try:
        buffers = workspace.buffers
        if comm is not None:
            comm.agree({**given, "rounds": rounds, "names": workspace.names, "shapes": [*map(list, workspace.shapes)]})
            comm.broadcast([workspace.x, buffers])
        algorithm.setup(workspace.x.clone(), len(clients), clients_per_round)
        server = FederatedServer(algorithm, buffers, workspace.buffer_sizes)
        folder = None if checkpoint_dir is None else local_path(checkpoint_dir)
        if algorithm.stateful:
            store = _make_store(state, folder, len(clients), shared=comm is not None)
        device = Device(algorithm, workspace, clients, loss, store, seed, reduction)
        back: InProcess | AllReduceBackend
        back = InProcess(device, planner, speeds, faults) if comm is None else AllReduceBackend(device, planner, comm)
        run = _Run(server, back, device, given, folder, comm)
        with generators_kept():

            def evaluated(round: int) -> Mapping[str, float]:
                if evaluate is None or rank != 0 or not evaluation_due(round, rounds, evaluate_every):
                    return {}
                return workspace.evaluated(algorithm.theta, server.buffers, evaluate, round)

            first = run.resume()
            if first == 0:
                run.history.start = evaluated(-1)
            for round in range(first, rounds):
                record = run.round(round, clients_per_round, seed, trace)
                record = replace(record, evaluation=evaluated(round))
                run.history.add(record, quietly=rank != 0)
                if folder is not None and (round == rounds - 1 or (round + 1) % checkpoint_every == 0):
                    run.save(folder, round)
                if on_round is not None:
                    on_round(record)
        workspace.write_to(model, algorithm.theta, server.buffers)
        run.history.about = {**given, "devices": count, "backend": "ranks" if ranks else "inprocess"}
        broken = False
        return run.history
    finally:
        if store is not None:
            store.close()
        if comm is not None:
            comm.close(broken=broken)


def check_numbers(
    rounds: int, clients_per_round: int, population: int, evaluate_every: int | None, checkpoint_every: int
) -> None:
    check_count("rounds", rounds)
    if population < 1:
        raise ValueError("there are no clients")
    check_cohort(clients_per_round, population)
    if evaluate_every is not None:
        check_count("evaluate_every", evaluate_every, 0)
    check_count("checkpoint_every", checkpoint_every)


def use_ranks(backend: str, devices: int | None, speeds: Any, faults: Any) -> bool:
    """Return whether the run uses the ranks of the process group; refuse options that do not match."""
    check_choice("backend", backend, ("auto", "inprocess", "ranks"))
    joined = dist.is_available() and dist.is_initialized()
    if backend == "ranks" and not joined:
        raise ValueError("backend='ranks' needs a process group: start with torchrun and init_process_group")
    ranks = backend == "ranks" or (backend == "auto" and joined)
    if devices is not None:
        check_count("devices", devices)
    if ranks and devices not in (None, dist.get_world_size()):
        raise ValueError(
            f"devices={devices} with {dist.get_world_size()} ranks: leave it out, as each rank is a device"
        )
    if ranks and (speeds is not None or faults):
        raise ValueError("speeds= and faults= are for emulated devices: use backend='inprocess'")
    return ranks


def _make_store(
    state: ClientStateStore | str | os.PathLike[str] | None, folder: Path | None, population: int, *, shared: bool
) -> ClientStateStore:
    if not isinstance(state, ClientStateStore):
        state = ClientStateStore(population, (folder and folder / "states") if state is None else state)
    if state.population != population:
        raise ValueError(f"the state store is for {state.population} clients, but the population has {population}")
    if shared and state.temporary:
        raise ValueError("several ranks need a shared folder for the clients' states: give state= or checkpoint_dir=")
    state.write_through |= shared
    return state


class _Run:
    def __init__(
        self, server: FederatedServer, back: InProcess | AllReduceBackend, device: Device, facts: Mapping[str, Any],
        folder: Path | None, comm: Any,
    ) -> None:  # fmt: skip
        self.server, self.back, self.device, self.facts, self.folder = server, back, device, facts, folder
        self.comm, self.rank = comm, 0 if comm is None else comm.rank
        self.history = History([], {}, {})

    def resume(self) -> int:
        """Load the checkpoint, if there is one. Return the round to begin with."""
        store = self.device.store
        found = None if self.folder is None else Checkpoint.load(self.folder, self.facts)
        if self.comm is not None:  # all ranks must see the same folder
            self.comm.agree({"the checkpoint's next round": 0 if found is None else found.round + 1})
        if store is not None:
            versions = None if found is None else found.versions
            if found is not None and (versions is None or versions.numel() != store.population):
                raise ValueError(f"{self.folder} contains no client states that fit: give another folder")
            store.begin(versions, durable=self.folder is not None, clean=self.rank == 0)
        if found is None:
            return 0
        self.server.restore(found.server)
        self.history = found.history
        return found.round + 1

    def round(self, round: int, clients_per_round: int, seed: int, trace: ClientTrace | None) -> RoundRecord:
        began = time.perf_counter()
        algorithm, server, population = self.server.algorithm, self.server, self.device.clients
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
                reduced = reduce(report.sums, task, algorithm, self.device.workspace.dtype)
            if trace is not None:
                passes = getattr(algorithm, "epochs", 1)
                each = report.sums.sent_bytes // max(1, report.sums.clients)
                work = [(client, population.samples(client) * passes, each) for client in chosen]
                client_seconds += trace.round_seconds(work, bytes_of(server.request.payload.values()))
            reports.append(report)
            server.deliver(reduced)
        if reduced is None:
            raise ValueError("program() must yield at least one RoundRequest")
        self.back.commit(round)
        if isinstance(self.back, AllReduceBackend) and round % _HASH_EVERY == 0:
            self.back.check_state(round, server.state())
        predictions = [report.predicted_seconds for report in reports]
        summed = ("device_seconds", "bytes_up", "bytes_down", "control_bytes")
        totals: dict[str, Any] = {name: sum(getattr(report, name) for report in reports) for name in summed}
        return RoundRecord(
            round=round,
            clients=reduced.clients,
            samples=reduced.samples,
            failed={client: why for report in reports for client, why in sorted(report.sums.failed.items())},
            metrics=dict(reduced.metrics),
            evaluation={},
            seconds=time.perf_counter() - began,
            **totals,
            predicted_seconds=None if None in predictions else sum(p for p in predictions if p is not None),
            schedule=" ".join(report.schedule for report in reports),
            busy_seconds=tuple(map(sum, zip(*(report.busy_seconds for report in reports)))),
            client_seconds=None if trace is None else client_seconds,
            client_bytes=sum(report.sums.sent_bytes for report in reports),
            lost_devices=tuple(lost for report in reports for lost in report.lost_devices),
        )

    def save(self, folder: Path, round: int) -> None:
        """Write the checkpoint. All ranks call this, wait until it is complete, and fail together."""
        store = self.device.store
        with self._together(round):  # afterwards all states are on disk
            if store is not None:
                store.flush()
        with self._together(round):
            if self.rank == 0:
                versions = None if store is None else torch.from_numpy(store.versions)
                Checkpoint(round, self.server.state(), versions, self.history, self.facts).save(folder)
        if store is not None:
            store.durable()

    @contextmanager
    def _together(self, round: int) -> Iterator[None]:
        cause, mine = None, b""
        try:
            yield
        except OSError as error:
            cause, mine = error, str(error).encode()
        everyones = [mine] if self.comm is None else self.comm.gather(mine)
        said = [f"rank {rank}: {text.decode()}" for rank, text in enumerate(everyones) if text]
        if said:
            raise OSError(f"no checkpoint of round {round} was written in {self.folder}: {'; '.join(said)}") from cause


@dataclass
class Federation:
    """Everything that defines a run: what ``build()`` returns to ``thinwire federated run`` and ``serve``.

    Attributes:
        algorithm: an executor and aggregator.
        model: with the initial weights.
        clients: the population.
        rounds, clients_per_round, seed, reduction: as for :func:`~thinwire.federated.simulate`.
        loss, evaluate, evaluate_every: likewise.
        per_client: an ``evaluate`` for ``thinwire federated run --per-client``, called in addition to the other: see
            :func:`~thinwire.federated.over_clients`.
        chance: what guessing reaches, by the names of the numbers that ``evaluate`` returns: a line in pictures.
        options: more arguments for ``simulate``.
    """

    algorithm: Any
    model: nn.Module
    clients: ClientData
    rounds: int = 10
    clients_per_round: int = 10
    loss: Loss = cross_entropy
    evaluate: Evaluate | None = None
    evaluate_every: int | None = None
    per_client: Evaluate | None = None
    chance: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    reduction: str = "fp64"
    options: Mapping[str, Any] = field(default_factory=dict)

    def simulate(self, **changes: Any) -> History:
        """Run it in this process; ``changes`` override its own values."""
        named = ("rounds", "clients_per_round", "loss", "evaluate", "evaluate_every", "seed", "reduction")
        arguments = {**{name: getattr(self, name) for name in named}, **self.options, **changes}
        return simulate(self.algorithm, self.model, self.clients, **arguments)


Build = Callable[[], Federation]


def check_federation(made: Any, name: str) -> Federation:
    if not isinstance(made, Federation):
        raise ValueError(f"{name} must return a thinwire.systems.federated.Federation, not {type(made).__name__}")
    return made
