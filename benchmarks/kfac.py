"""K-FAC's schedules side by side, and K-FAC beside other optimizers. ``python benchmarks/kfac.py schedules|tasks``

``schedules``: in the lab, 4 ranks, 1 Gb/s, new statistics and inverses on every step; all rows in turns on the same
ranks; of each the phases and the step (median, slowest rank), and what the planner predicted from prices that were
measured in the same run. ``tasks``: steps and seconds to a loss on the ill-conditioned teacher and on the digits,
every optimizer tuned over five rates.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import thinwire as tw
from thinwire.core.pricing.costs import Costs
from thinwire.core.pricing.placement import place_threshold
from thinwire.systems.kfac import KFAC, KFACPlan, Variant, make_plan, published
from thinwire.systems.kfac.assignment import PlanMaker, by_cost, cheapest, fused, up_to
from thinwire.systems.kfac.planning import measured_costs
from thinwire.systems.kfac.predict import predict
from thinwire.systems.kfac.prices import LayerTimes, layers_of
from thinwire.tools.bench.models.registry import build_model

RESULTS = Path(__file__).parent / "results" / "kfac.json"


def threshold(plan: KFACPlan, costs: Costs, times: LayerTimes) -> KFACPlan:
    """The published placement alone."""
    plan = by_cost(plan, costs, times)
    owners = place_threshold([plan.dim(i) for i in range(len(plan.owners))], plan.world_size).owner
    return cheapest([replace(plan, owners=owners)], costs)


def layer_by_layer(plan: KFACPlan, costs: Costs, times: LayerTimes) -> KFACPlan:
    return fused(by_cost(plan, costs, times), [up_to(0)], costs, times)


ROWS: dict[str, PlanMaker] = {
    "dkfac": published.dkfac,
    "mpd": published.mpd,
    "spd": by_cost,
    "spd, published rules": published.spd,
    "spd, threshold 1400": threshold,
    "spd, layer by layer": layer_by_layer,
    "kaisa:1/2": published.kaisa("1/2"),
}
WORKERS = 4  # of a name without a number
PHASES = ("capture", "factor_wait", "invert", "inverse_wait", "precondition", "return_wait")


def networks(name: str) -> tuple[nn.Module, Callable[[int, int], torch.Tensor]]:
    """A model, and its loss on a rank's batch of a step."""
    torch.manual_seed(0)
    if name == "mlp":
        widths = (512, 512, 512, 512, 512, 10)
        layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())]
        net, shape = nn.Sequential(*layers[:-1]), (512, 512)
    else:
        net, shape = build_model("resnet18:width=16").model, (8, 3, 32, 32)

    def loss(step: int, rank: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(step * 1009 + rank)
        x, y = torch.randn(shape, generator=draw), torch.randint(10, (shape[0],), generator=draw)
        return nn.functional.cross_entropy(net(x), y)

    return net, loss


# --- schedules ------------------------------------------------------------------------------------------------------


def rank_main(model: str, steps: int, rounds: int, names: list[str]) -> None:
    import torch.distributed as dist

    from thinwire.predict.measure import profile_model

    torch.set_num_threads(1)
    rows = {row: ROWS[row] for row in names}
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    net, loss = networks(model)
    profile = profile_model(
        net, count(), lambda net, step: loss(step, rank), steps=8, warmup=2, name=model, seconds=20.0
    )
    layers = layers_of(profile)
    with tw.attach(net, torch.optim.SGD(net.parameters(), 0.01)) as sync:
        costs = measured_costs(sync, layers, "inverse")
    predicted = {}
    for row, maker in rows.items():
        plan = make_plan(layers, world, costs, LayerTimes.of_profile(profile, layers), maker=maker)
        predicted[row] = predict(plan, profile, costs).step_seconds()
    seconds: dict[str, list[float]] = {row: [] for row in rows}
    phases: dict[str, list[list[float]]] = {row: [] for row in rows}
    owned: dict[str, str] = {}
    for turn in range(rounds):
        for row, maker in rows.items():
            net, loss = networks(model)
            optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
            with tw.attach(net, optimizer) as sync:
                variant = Variant(plan=maker, costs=costs)
                kfac = KFAC(net, sync, damping=0.03, factor_update_steps=1, inv_update_steps=1, variant=variant)
                for step in range(steps + 4):  # two rounds, then the messages are planned again
                    if step == 4:
                        sync.services.agree(False)
                        before, started = kfac.stats(), time.perf_counter()
                    loss(step, rank).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                sync.services.agree(False)
                mine = (time.perf_counter() - started) / steps
                now = kfac.stats()
                plan = kfac.plan
            spent = [(getattr(now, f"{p}_seconds") - getattr(before, f"{p}_seconds")) / steps for p in PHASES]
            everyone = torch.tensor([mine, *spent], dtype=torch.float64)
            dist.all_reduce(everyone, dist.ReduceOp.MAX)
            seconds[row].append(float(everyone[0]))
            phases[row].append(everyone[1:].tolist())
            everywhere = sum(o < 0 for o in plan.owners)
            owned[row] = (
                f"{len(plan.a_buckets)}+{len(plan.g_buckets)}, {everywhere}/{len(plan.owners)}, {plan.transport}"
            )
        if rank == 0:
            print(f"@@ round {turn + 1} of {rounds}", flush=True)
    if rank == 0:
        found = {
            row: {
                "plan": owned[row], "step": statistics.median(seconds[row]), "predicted": predicted[row],
                **{p: statistics.median(x[i] for x in phases[row]) for i, p in enumerate(PHASES)},
                "all_steps": seconds[row],
            }
            for row in rows
        }  # fmt: skip
        print("@@" + json.dumps(found), flush=True)
    dist.destroy_process_group()


def schedules(model: str, workers: int, link: str, steps: int, rounds: int, names: list[str]) -> dict[str, Any]:
    from thinwire.tools import lab

    found: dict[str, Any] = {}

    def on_line(rank: int, text: str) -> None:
        if text.startswith("@@{"):
            found.update(json.loads(text[2:]))
        else:
            print(f"[{rank}] {text.removeprefix('@@')}", file=sys.stderr, flush=True)

    command = [sys.executable, __file__, "schedules", "--rank", "--model", model]
    command += ["--steps", str(steps), "--rounds", str(rounds), "--rows", ";".join(names)]
    result = lab.run(lab.Cluster.parse(workers, 1, link, None), command, on_line=on_line, timeout_seconds=1500)
    if result.exit_code:
        sys.exit("the ranks failed")
    base = found.get("spd", found[names[0]])["step"]
    columns = ("row", "A+G, by all, sent by", *(p.replace("_", " ") for p in PHASES), "step", "/ spd", "predicted")
    table = Table(*columns, title=f"{model}, {workers} ranks, {link}, ms")
    for row, x in found.items():
        parts = [f"{1e3 * x[p]:.1f}" for p in PHASES]
        table.add_row(
            row, x["plan"], *parts, f"{1e3 * x['step']:.1f}", f"{x['step'] / base:.2f}", f"{1e3 * x['predicted']:.1f}"
        )
    Console(width=200).print(table)
    return {"workers": workers, "link": link, "emulated": result.emulated, "rows": found}


# --- tasks ----------------------------------------------------------------------------------------------------------


def contenders(model: nn.Module, name: str, lr: float, damping: float) -> list[torch.optim.Optimizer]:
    if name == "adamw":
        return [torch.optim.AdamW(model.parameters(), lr, weight_decay=0.0)]
    if name == "muon":
        hidden = [p for p in model.parameters() if p.dim() == 2]
        rest = [p for p in model.parameters() if p.dim() != 2]
        return [torch.optim.Muon(hidden, lr, weight_decay=0.0), torch.optim.AdamW(rest, lr, weight_decay=0.0)]
    return [torch.optim.SGD(model.parameters(), lr, momentum=0.9)]


RATES = {
    "sgd": (0.03, 0.1, 0.3, 1.0, 3.0), "adamw": (1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
    "muon": (1e-3, 3e-3, 1e-2, 3e-2, 1e-1), "kfac": (0.03, 0.1, 0.3, 1.0, 3.0),
}  # fmt: skip
TASKS = {
    "teacher": {
        "target": 0.3,
        "steps": 400,
        "damping": 1e-3,
        "kfac": {"factor_update_steps": 1, "inv_update_steps": 1},
    },
    "digits": {
        "target": 0.62,
        "steps": 600,
        "damping": 3e-2,
        "kfac": {"factor_update_steps": 5, "inv_update_steps": 25},
    },
}


def train(task: str, name: str, lr: float, seed: int) -> dict[str, float]:
    """Steps and seconds to the target (training alone; evaluation is not timed), and the best loss."""
    options = TASKS[task]
    torch.manual_seed(seed)
    workload = build_model(f"teacher:seed={seed}" if task == "teacher" else "digits:batch=64", seed=seed)
    model = workload.model
    optimizers = contenders(model, name, lr, options["damping"])
    if name == "kfac":
        KFAC(model, None, optimizer=optimizers[0], damping=options["damping"], method="eigen", **options["kfac"])
    seconds, best = 0.0, float("inf")
    for step in range(options["steps"]):
        started = time.perf_counter()
        loss = workload.loss(model, step, 0)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        seconds += time.perf_counter() - started
        if step % 5 == 4:
            now = workload.held_out_loss()
            best = min(best, now) if now == now else best
            if now < options["target"]:
                return {"steps": step + 1, "seconds": seconds, "best": now, "step_seconds": seconds / (step + 1)}
    return {"steps": float("inf"), "seconds": float("inf"), "best": best, "step_seconds": seconds / options["steps"]}


def tasks(seeds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for task, options in TASKS.items():
        table = Table(
            title=f"{task}: to loss {options['target']} within {options['steps']} steps, median of {seeds} seeds"
        )
        for column in ("optimizer", "best rate", "steps", "seconds", "best loss", "ms a step"):
            table.add_column(column, justify="right")
        for name, rates in RATES.items():
            runs = {lr: [train(task, name, lr, seed) for seed in range(seeds)] for lr in rates}
            middle = {lr: {k: statistics.median(r[k] for r in rs) for k in rs[0]} for lr, rs in runs.items()}
            lr = min(middle, key=lambda r: (middle[r]["steps"], middle[r]["best"]))
            row = middle[lr]
            found[f"{task}, {name}"] = {"lr": lr, **{k: v if v < float("inf") else None for k, v in row.items()}}
            cells = [
                f"{row['steps']:.0f}",
                f"{row['seconds']:.2f}",
                f"{row['best']:.3f}",
                f"{1e3 * row['step_seconds']:.2f}",
            ]
            table.add_row(name, f"{lr:g}", *cells)
            print(f"... {task}, {name}: {found[f'{task}, {name}']}", file=sys.stderr, flush=True)
        Console().print(table)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("schedules", "tasks"))
    parser.add_argument("--model", choices=("mlp", "resnet"), default="mlp")
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--link", default="1gbit")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", default=";".join(ROWS), help="names of rows, between semicolons")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = [name.strip() for name in options.rows.split(";")]
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"unknown rows {', '.join(unknown)}; there are {'; '.join(ROWS)}")
    if options.rank:
        rank_main(options.model, options.steps, options.rounds, names)
        return
    if options.what == "tasks":
        name, found = "tasks", tasks(options.seeds)
    else:
        found = schedules(options.model, options.workers, options.link, options.steps, options.rounds, names)
        name = f"schedules, {options.model}, {options.link}"
        if options.workers != WORKERS:
            name += f", {options.workers} workers"
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps({**known, name: found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
