"""Train the character GPT of thinwire's bench with one added line.

thinwire lab run --workers 2 --link 200mbit -- python examples/chargpt/train.py --method acp
torchrun --nproc-per-node 2 examples/chargpt/train.py
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from thinwire.bench.models.registry import build_model

import thinwire as tw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="acp")
    parser.add_argument("--model", default="chargpt")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    workload = build_model(options.model)
    model, optimizer = workload.model, workload.optimizer(workload.model)

    sync = tw.attach(model, optimizer, options.method)  # the one line

    start = time.perf_counter()
    for step in range(options.steps):
        optimizer.zero_grad()
        loss = workload.loss(model, step, rank)
        loss.backward()
        optimizer.step()
        if rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1:4d}  loss {loss.item():.3f}  {time.perf_counter() - start:.1f} s", flush=True)
    if rank == 0:
        stats = sync.stats()
        print(f"sent {stats.bytes_sent / 1e6:.1f} MB per rank instead of {stats.dense_bytes / 1e6:.1f} MB", flush=True)
    sync.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
