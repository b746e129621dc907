"""Train the ill-conditioned teacher to a loss, with K-FAC and with SGD, and compare the seconds.

thinwire lab run --workers 4 --link 100mbit -- python examples/kfac/train.py
torchrun --nproc-per-node 2 examples/kfac/train.py --optimizer kfac
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist

import thinwire as tw
from thinwire.bench.models.registry import build_model
from thinwire.kfac import KFAC


def train(optimizer_name: str, target: float, lr: float, most: int) -> tuple[int | None, float, float]:
    """(steps to the target, seconds of training, last loss); evaluation every 10 steps is not timed."""
    rank, world = dist.get_rank(), dist.get_world_size()
    workload = build_model(f"teacher:ranks={world}")
    model = workload.model
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    sync = tw.attach(model, optimizer)
    if optimizer_name == "kfac":
        every = {"factor_update_steps": 1, "inv_update_steps": 5}
        KFAC(model, sync, damping=1e-3, method="eigen", schedule="dkfac", **every)  # factors this small need no plan
    seconds, loss = 0.0, float("nan")
    for step in range(most):
        start = time.perf_counter()
        workload.loss(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds += time.perf_counter() - start
        if step % 10 == 9:
            loss = float(workload.evaluate(model, 0, rank))
            if rank == 0 and step % 500 == 499:
                print(f"{optimizer_name:>5} step {step + 1:5d}  loss {loss:.3f}  {seconds:.1f} s", flush=True)
            if sync.services.agree(loss < target):
                break
    sync.close()
    return (step + 1 if loss < target else None), seconds, loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", choices=("kfac", "sgd", "both"), default="both")
    parser.add_argument("--target", type=float, default=0.3)
    parser.add_argument("--steps", type=int, default=4000, help="at most")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in ("kfac", "sgd") if options.optimizer == "both" else (options.optimizer,):
        steps, seconds, loss = train(name, options.target, 0.1, options.steps)
        if dist.get_rank() == 0:
            reached = f"reached {options.target:g} after {steps} steps"
            end = reached if steps else f"is at {loss:.3f} after {options.steps} steps"
            print(f"{name:>5}: {end}, {seconds:.1f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
