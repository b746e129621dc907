"""Train the ill-conditioned teacher to a loss, with K-FAC and with SGD, and compare the seconds.

thinwire lab run --workers 4 --link 100mbit -- python examples/kfac/train.py
torchrun --nproc-per-node 2 examples/kfac/train.py --optimizer kfac
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from thinwire.bench.models.registry import build_model
from thinwire.kfac import KFAC, Variant

import thinwire as tw
from thinwire.tools.pictures import Level, Panel, Picture, Series, check_plot, write_picture


def train(optimizer_name: str, target: float, lr: float, most: int) -> list[tuple[int, float, float]]:
    """(steps, seconds of training, loss) every 10 steps, until the target; evaluation is not timed."""
    rank, world = dist.get_rank(), dist.get_world_size()
    workload = build_model(f"teacher:ranks={world}")
    model = workload.model
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    sync = tw.attach(model, optimizer)
    if optimizer_name == "kfac":
        every = {"factor_update_steps": 1, "inv_update_steps": 5}
        dkfac = Variant(schedule="dkfac")  # factors this small need no plan
        KFAC(model, sync, damping=1e-3, method="eigen", variant=dkfac, **every)
    seconds, curve = 0.0, [(0, 0.0, workload.held_out_loss(rank))]
    for step in range(most):
        start = time.perf_counter()
        workload.loss(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds += time.perf_counter() - start
        if step % 10 == 9:
            loss = workload.held_out_loss(rank)
            curve.append((step + 1, seconds, loss))
            if rank == 0 and step % 500 == 499:
                print(f"{optimizer_name:>5} step {step + 1:5d}  loss {loss:.3f}  {seconds:.1f} s", flush=True)
            if sync.services.agree(loss < target):
                break
    sync.close()
    return curve


def picture(curves: dict[str, list[tuple[int, float, float]]], target: float) -> Picture:
    """Loss against seconds and steps, of all that were trained."""
    names = {"kfac": "K-FAC", "sgd": "SGD"}
    panels = []
    for axis, place in (("seconds", 1), ("steps", 0)):
        lines = []
        for name, rows in curves.items():
            x = tuple(float(row[place]) for row in rows)
            lines.append(Series(names[name], x, tuple(row[2] for row in rows)))
        panels.append(Panel(axis, "loss", tuple(lines), levels=(Level(target, "target"),), y_range=(0.0, 4.0)))
    return Picture(f"Teacher with inputs of scales 1 to 0.01, {dist.get_world_size()} workers", tuple(panels))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", choices=("kfac", "sgd", "both"), default="both")
    parser.add_argument("--target", type=float, default=0.3)
    parser.add_argument("--steps", type=int, default=4000, help="at most")
    parser.add_argument("--plot", type=Path, help="also draw: a .png or .html file")
    parser.add_argument("--json", type=Path, help="also write the curves, for thinwire report")
    options = parser.parse_args()
    check_plot(options.plot)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    curves = {}
    for name in ("kfac", "sgd") if options.optimizer == "both" else (options.optimizer,):
        curves[name] = train(name, options.target, 0.1, options.steps)
        steps, seconds, loss = curves[name][-1]
        if dist.get_rank() == 0:
            end = f"reached {options.target:g}" if loss < options.target else f"is at {loss:.3f}"
            print(f"{name:>5}: {end} after {steps} steps, {seconds:.1f} s", flush=True)
    if dist.get_rank() == 0:
        drawn = picture(curves, options.target)
        if options.plot is not None:
            write_picture(drawn, options.plot)
            print(f"written: {options.plot}", flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps({"curves": curves, "picture": asdict(drawn)}), encoding="utf-8")
            print(f"written: {options.json}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
