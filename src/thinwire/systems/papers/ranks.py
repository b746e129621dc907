"""What ranks of the lab run for a paper: ``python -m thinwire.systems.papers.ranks PROGRAM ARGUMENTS``."""

from __future__ import annotations

import copy
import hashlib
import io
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import thinwire as tw
from thinwire.core.events import tell_event
from thinwire.systems import federated as fl
from thinwire.systems.federated.aggregator import cross_entropy
from thinwire.systems.federated.builtin import digits
from thinwire.systems.kfac import KFAC, Variant, published
from thinwire.systems.kfac.assignment import by_cost
from thinwire.systems.kfac.planning import measured_costs
from thinwire.systems.optim import LARS
from thinwire.tools.bench.models.digits import images, network
from thinwire.tools.bench.models.registry import build_model

SCHEDULES = {
    "D-KFAC": published.dkfac,
    "MPD-KFAC": published.mpd,
    "SPD-KFAC": published.spd,
    "our rules": by_cost,
    "KAISA, one half": published.kaisa("1/2"),
}
"""SPD-KFAC as published, and by what is cheapest."""


def kfac(model: str, rounds: str, steps: int = 4, warmup: int = 4) -> None:
    """Time steps of all schedules in turns, with new statistics and inverses on every step; tells their medians."""
    costs, seconds = None, {row: list[float]() for row in SCHEDULES}
    for turn in range(int(rounds)):
        for row, plan in SCHEDULES.items():
            work, rank = build_model(model), dist.get_rank()
            optimizer = torch.optim.SGD(work.model.parameters(), 0.01, momentum=0.9)
            with tw.attach(work.model, optimizer) as sync:
                second = KFAC(work.model, sync, damping=0.03, factor_update_steps=1, inv_update_steps=1,
                              variant=Variant(plan=plan, costs=costs))  # fmt: skip
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


PARTS: dict[str, tuple[str, ...]] = {
    "fp16 torus": (),
    "cached input": ("cache",),
    "shared norms": ("pto",),
    "HiTopK": ("hitopk",),
    "all": ("cache", "pto", "hitopk"),
}
"""Rows of :func:`together`, and what of the paper each has."""


def decoded(sample: tuple[bytes, int]) -> tuple[Tensor, int]:
    from PIL import Image

    image = Image.open(io.BytesIO(sample[0])).resize((8, 8), Image.Resampling.BOX)
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(1, 8, 8) / 255, sample[1]


def together(rounds: str, steps: int = 6, warmup: int = 4, batch: int = 16) -> None:
    """Time steps with LARS on JPEG files of 256 x 256 pixels, by the parts of HiTopK's paper; tells their medians."""
    from PIL import Image

    pixels, labels = (x[dist.get_rank() :: dist.get_world_size()][: 8 * batch] for x in images())
    files, seconds = list[tuple[bytes, int]](), {row: list[float]() for row in PARTS}
    for image, label in zip((255 * pixels[:, 0]).to(torch.uint8).numpy(), labels.tolist()):
        file = io.BytesIO()
        Image.fromarray(image).resize((256, 256)).save(file, "JPEG")
        files.append((file.getvalue(), label))
    with tempfile.TemporaryDirectory() as folder:
        cache = tw.data.CachedDataset(files, decoded, dataset_id="digits", version=1, prefix_id="decoded",
                                      memory_bytes=1 << 22, directory=folder)  # fmt: skip
        for turn, (row, parts) in itertools.product(range(int(rounds)), PARTS.items()):
            model = network()
            optimizer = LARS(model.parameters(), 0.1, momentum=0.9, parallel="world" if "pto" in parts else None)
            options = {"density": 0.1} if "hitopk" in parts else {"dtype": "fp16", "collective": "torus"}
            times = list[float]()
            with tw.attach(model, optimizer, "hitopk" if "hitopk" in parts else "cast", **options):
                for step in range(warmup + steps):
                    dist.barrier()
                    began = time.perf_counter()
                    chosen = [(step * batch + i) % len(files) for i in range(batch)]
                    x, y = zip(*(cache[i] if "cache" in parts else decoded(files[i]) for i in chosen))
                    F.cross_entropy(model(torch.stack(x)), torch.tensor(y)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    times.append(time.perf_counter() - began)
            seconds[row].append(statistics.median(times[warmup:]))
            if dist.get_rank() == 0:
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


PROGRAMS: dict[str, Callable[..., None]] = {"kfac": kfac, "clients": clients, "federated": federated,
                                            "together": together}  # fmt: skip

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
    dist.destroy_process_group()
