"""``simulate``: train many clients on few devices."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from thinwire.systems.federated.aggregator import facts as facts_of
from thinwire.systems.federated.allreduce import AllReduceBackend, join
from thinwire.systems.federated.backend import Planner
from thinwire.systems.federated.client import Loss, cross_entropy
from thinwire.systems.federated.clocks import ClientTrace, Speed
from thinwire.systems.federated.cohort import generators_kept
from thinwire.systems.federated.data import ClientData
from thinwire.systems.federated.device import Device
from thinwire.systems.federated.history import History, RoundRecord
from thinwire.systems.federated.inprocess import InProcess
from thinwire.systems.federated.options import check_numbers, make_store, use_ranks
from thinwire.systems.federated.rounds import Run
from thinwire.systems.federated.server import FederatedServer, evaluation_due
from thinwire.systems.federated.state import ClientStateStore
from thinwire.systems.federated.workspace import Evaluate, Workspace


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
    window_rounds: int | None = 5,
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
        devices: how many the in-process back end emulates, each with its own clock; with ``"ranks"`` the number of
            ranks.
        backend: "inprocess", "ranks" (one device per rank of the default process group), or "auto": ranks if there is a
            process group.
        schedule: "equal", "lpt", "pull" or "auto"; see :mod:`~thinwire.federated.schedule`.
        reduction: "fp32", "fp64" or "exact"; see :mod:`~thinwire.federated.accumulate`.
        seed: for cohorts and clients.
        state: where the clients' states are kept: a folder or a store; None: next to the checkpoint, or in a temporary
            folder.
        evaluate: (model in eval mode, round) -> numbers, on rank 0.
        evaluate_every: in rounds; also before the first and after the last one. None: at most 20 times in a run; 0:
            only after the last round.
        checkpoint_dir: a folder; a run that finds a checkpoint in it continues from there.
        checkpoint_every: in rounds; also after the last one.
        warmup_rounds, window_rounds: for the fits that ``lpt`` uses.
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
    planner = Planner(schedule, count, seed, warmup_rounds, window_rounds)
    given = {
        **facts_of(algorithm),
        "clients": len(clients),
        "clients_per_round": clients_per_round,
        "seed": seed,
        "reduction": reduction,
    }
    broken = True
    store: ClientStateStore | None = None
    try:
        buffers = workspace.buffers
        if comm is not None:
            comm.agree({**given, "rounds": rounds, "names": workspace.names, "shapes": [*map(list, workspace.shapes)]})
            comm.broadcast([workspace.x, buffers])
        algorithm.setup(workspace.x.clone(), len(clients), clients_per_round)
        server = FederatedServer(algorithm, buffers, workspace.buffer_sizes)
        folder = None if checkpoint_dir is None else Path(checkpoint_dir)
        if algorithm.stateful:
            store = make_store(state, folder, len(clients), shared=comm is not None)
        device = Device(algorithm, workspace, clients, loss, store, seed, reduction)
        back: InProcess | AllReduceBackend
        back = InProcess(device, planner, speeds, faults) if comm is None else AllReduceBackend(device, planner, comm)
        run = Run(server, back, device, given, folder, rank)
        with generators_kept():

            def evaluated(round: int) -> Mapping[str, float]:
                if evaluate is None or rank != 0 or not evaluation_due(round, rounds, evaluate_every):
                    return {}
                return workspace.evaluated(algorithm.theta, server.buffers, evaluate, round)

            first = run.resume(comm)
            if first == 0:
                run.history.start = evaluated(-1)
            for round in range(first, rounds):
                record = run.round(round, clients_per_round, seed, trace)
                last = round == rounds - 1
                record = replace(record, evaluation=evaluated(round))
                run.history.add(record, quietly=rank != 0)
                if folder is not None and (last or (round + 1) % checkpoint_every == 0):
                    run.save(round, comm)
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
