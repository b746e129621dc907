"""FedML Parrot: many clients on few devices, clients' states on disk, clients dealt out by the devices' speed."""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Iterator, Mapping

import torch

from thinwire.systems import federated as fl
from thinwire.systems.papers.paper import Paper, Shown, Word
from thinwire.systems.papers.ranks import built_in, weights_of
from thinwire.systems.papers.workbench import Workbench
from thinwire.tools.lab import Cluster

CLIENTS, COHORT = 3400, 1000
"""FEMNIST's, and how many of them a round; sizes are drawn, log-normal with mean 110 and a deviation of 0.7."""
DEVICES = {"8 equal GPUs": [1.0] * 8, "8 GPUs, half of them at 50 %": [1.0] * 4 + [0.5] * 4,
           "8 GPUs at 100, 60 and 30 %": [1.0] * 3 + [0.6] * 3 + [0.3] * 2}  # fmt: skip


def simulated() -> Iterator[Shown]:
    draw = random.Random(0)
    sizes = [max(1, round(draw.lognormvariate(4.7 - 0.245, 0.7))) for _ in range(CLIENTS)]
    for name, shares in DEVICES.items():
        speeds = [fl.Speed(1e-3 / share, 0.05 / share) for share in shares]
        equal, auto = (
            fl.predict(way, CLIENTS, sizes.__getitem__, speeds, rounds=50, clients_per_round=COHORT).seconds
            for way in ("equal", "auto")
        )
        what = f"{COHORT:,} of {CLIENTS:,} clients a round, {name}: equal parts over auto, seconds a round"
        yield Shown(name, what, equal / auto, published="1.2 to 4, over FedScale")


def measured(bench: Workbench) -> Iterator[Shown]:
    one = Cluster(1)
    rows = {way: bench.ranks("clients", way, 1000, cluster=one) for way in ("models", "devices")}
    rows["many"] = bench.ranks("clients", "devices", 10_000, cluster=one)
    for row, what in (("models", "1,000 clients, a model each"), ("devices", "1,000 clients on 4 devices"),
                      ("many", "10,000 clients on 4 devices")):  # fmt: skip
        yield Shown(f"{row} MB", f"SCAFFOLD, CNN of 73 KB, {what}: growth", rows[row]["bytes"] / 1e6, "MB")
        yield Shown(f"{row} s", f"SCAFFOLD, CNN of 73 KB, {what}: a round", rows[row]["seconds"], "s")
    least = max(rows["devices"]["bytes"], 1e5)
    yield Shown("memory", "growth of a model a client over devices, 1,000 clients", rows["models"]["bytes"] / least,
                published="10 to 100, over FedML")  # fmt: skip
    rounds, seconds = 12 if bench.full else 7, dict[str, float]()
    torch.set_num_threads(1)  # as the ranks do: with more, convolutions add in another order
    made = built_in()
    made.simulate(rounds=rounds, clients_per_round=30, devices=4, reduction="exact", evaluate_every=0)
    hashes = {weights_of(made.model)}
    for way in ("equal", "lpt", "pull"):
        with tempfile.TemporaryDirectory() as folder:
            found = bench.ranks("federated", way, rounds, 0.02, folder, cluster=Cluster(3))
        seconds[way] = found["seconds"]
        hashes.add(found["weights"])
    for way in ("lpt", "pull"):
        what = f"digits, 30 of 100 clients, 3 ranks at 100, 60 and 30 %: equal parts over {way}, seconds a round"
        yield Shown(way, what, seconds["equal"] / seconds[way], published="1.2 to 4, over FedScale")
    what = "different weights, of one file in a process with 4 devices and on 3 ranks under three schedules"
    yield Shown("different", what, len(hashes) - 1, "", published="0")


def judge(found: Mapping[str, float]) -> tuple[Word, str]:
    memory, gain, equal = found["memory"], max(found["lpt"], found["pull"]), found["8 equal GPUs"]
    figures = (
        f"1,000 clients take {memory:.0f} times less memory than with a model for each. A round is {gain:.2f} "
        f"times as fast as with equal parts on devices of different speed, and {equal:.2f} times on equal ones"
    )
    if memory < 8 or gain < 1.05 or found["different"]:
        return "does not hold:", figures + ("; weights differ" if found["different"] else "")
    if min(gain, statistics.fmean((gain, equal))) < 1.15:
        return "holds where", f"devices differ in speed: {figures}"
    return "holds", figures


PAPER = Paper(
    system="FedML Parrot",
    title="FedML Parrot: A Scalable Federated Learning System via Heterogeneity-aware Scheduling on Sequential and "
    "Hierarchical Training",
    authors="Z. Tang, X. Chu, R. Y. Ran, S. Lee, S. Shi, Y. Zhang, Y. Wang, A. Q. Liang, S. Avestimehr, C. He (2023)",
    link="https://arxiv.org/abs/2303.01778",
    claim="1.2 to 4 times as fast as FedScale, 10 to 100 times less memory than FedML; 1,000 stateful clients",
    setting="FEMNIST, ImageNet and Reddit, 100 to 10,000 clients on 4 to 32 GPUs",
    page="federated.md",
    needs={"digits": ("sklearn",), "federated": ("safetensors",)},
    main={
        "8 equal GPUs": "times as fast as equal parts, 8 equal GPUs",
        "8 GPUs at 100, 60 and 30 %": "times as fast as equal parts, 8 GPUs of three speeds",
        "memory": "memory saved, 1,000 clients with states",
        "many MB": "memory of 10,000 clients on 4 devices",
        "lpt": "times as fast as equal parts, digits, 3 ranks of different speed",
        "different": "different weights, one process and 3 ranks",
    },
)
