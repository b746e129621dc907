"""What ranks of the lab run for a paper: ``python -m thinwire.systems.papers.ranks PROGRAM ARGUMENTS``."""

from __future__ import annotations

import copy
import hashlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import thinwire as tw
from thinwire.core.events import tell_event
from thinwire.systems import federated as fl
from thinwire.systems.federated.aggregator import cross_entropy
from thinwire.systems.federated.builtin import digits
from thinwire.systems.kfac import KFAC, Variant
from thinwire.systems.kfac.planning import measured_costs
from thinwire.tools.bench.models.digits import images, network
from thinwire.tools.bench.models.registry import build_model

SCHEDULES = {
    "D-KFAC": Variant("dkfac"),
    "MPD-KFAC": Variant("mpd"),
    "SPD-KFAC": Variant("spd", "spd", "threshold:1400", "d", "broadcast"),
    "our rules": Variant("spd"),
    "KAISA, one half": Variant("kaisa:1/2"),
}
"""SPD-KFAC as published, and by what is cheapest."""


def kfac(model: str, rounds: str, steps: int = 4, warmup: int = 4) -> None:
    """Time steps of all schedules in turns, with new statistics and inverses on every step; tells their medians."""
    costs, seconds = None, {row: list[float]() for row in SCHEDULES}
    for turn in range(int(rounds)):
        for row, variant in SCHEDULES.items():
            work, rank = build_model(model), dist.get_rank()
            optimizer = torch.optim.SGD(work.model.parameters(), 0.01, momentum=0.9)
            with tw.attach(work.model, optimizer) as sync:
                second = KFAC(work.model, sync, damping=0.03, factor_update_steps=1, inv_update_steps=1,
                              variant=replace(variant, costs=costs))  # fmt: skip
                costs = costs or measured_costs(sync, second.plan.layers, "inverse")
                for step in range(warmup + steps):
                    if step == warmup:  # the messages have been planned again
                        dist.barrier()
                        began = time.perf_counter()
                    work.loss(work.model, step, rank).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                dist.barrier()
                seconds[row].append((time.perf_counter() - began) / steps)
            if rank == 0:
                tell_event({"now": f"round {turn + 1}, {row}: {seconds[row][-1]:.3f} s a step"})
    tell_event({row: statistics.median(found) for row, found in seconds.items()})


def peak_bytes() -> int:
    """Return the most memory that this program has had; what ``getrusage`` says begins at its parent's."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def clients(way: str, count: str) -> None:
    """Train stateful clients, ten digits each, once, on devices or with a model each. Tells peak growth and seconds."""
    number, (pixels, labels) = int(count), images()

    def load(client: int) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(1437, (10,), generator=torch.Generator().manual_seed(client))
        return pixels[chosen], labels[chosen]

    def on_devices(model: torch.nn.Module, many: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            store = fl.ClientStateStore(many, folder, 0)
            algorithm = fl.Scaffold(lr=0.1, batch_size=10, max_grad_norm=1.0)
            population = fl.FunctionClients(many, load, 10)
            fl.simulate(algorithm, model, population, rounds=1, clients_per_round=many, devices=4, state=store,
                        backend="inprocess")  # fmt: skip

    model = network(8, 64)
    on_devices(model, 4)  # what torch itself takes, once
    before, began = peak_bytes(), time.perf_counter()
    if way == "devices":
        on_devices(model, number)
    else:
        models = [copy.deepcopy(model) for _ in range(number)]
        states = [[torch.zeros_like(p) for p in one.parameters()] for one in models]  # SCAFFOLD's variates
        for client, (one, state) in enumerate(zip(models, states)):
            x, y = load(client)
            for variate, g in zip(state, torch.autograd.grad(cross_entropy(one, (x, y)), list(one.parameters()))):
                variate += g
    tell_event({"bytes": peak_bytes() - before, "seconds": time.perf_counter() - began})


def federated(schedule: str, rounds: str, pace: str, states: str) -> None:
    """Train the digits' federation, a device a rank, of speeds 100, 60 and 30 %: a batch of the first takes ``pace``.

    Tells the median seconds of rounds, without the first three, and the weights' hash.
    """
    made, speed = built_in(), (1.0, 0.6, 0.3)[dist.get_rank()]

    def slowed(model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        time.sleep(float(pace) / speed)
        return cross_entropy(model, batch)

    options = {"clients_per_round": 30, "reduction": "exact", "evaluate_every": 0}
    history = made.simulate(rounds=int(rounds), loss=slowed, schedule=schedule, state=states, **options)
    seconds = statistics.median(row.device_seconds for row in history.rounds[3:])
    tell_event({"seconds": seconds, "weights": weights_of(made.model)})


def built_in() -> fl.Federation:
    made = digits(alpha=0.3)
    made.algorithm = fl.Scaffold(lr=0.1, batch_size=5, max_grad_norm=1.0)
    return made


def weights_of(model: torch.nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


PROGRAMS: dict[str, Callable[..., None]] = {"kfac": kfac, "clients": clients, "federated": federated}

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
    dist.destroy_process_group()
