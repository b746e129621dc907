"""Asynchronous training from a script: rank 0 serves, the others work, the last one four times slower.

thinwire lab run --workers 4 --link 200mbit -- python examples/async/train.py
"""

from __future__ import annotations

import argparse
import os

import torch
from thinwire.bench.models.registry import build_model
from torch import Tensor, nn

from thinwire import parameter_server as ps

PORT = 29400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", default="inhad:max_staleness=4")
    parser.add_argument("--model", default="chargpt:layers=2:width=128:heads=4")
    parser.add_argument("--gradients", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    workload = build_model(options.model)

    if rank == 0:
        status = ps.serve(
            workload.model,
            settings=ps.preset(options.settings),
            port=PORT,
            host=os.environ["MASTER_ADDR"],  # the lab gives its ranks a secret, without which no other address is taken
            outer=lambda params: torch.optim.AdamW(params, lr=2e-3),
            gradients=options.gradients,
        )
        print(
            f"version {status.version}, {status.gradients} gradients in {status.seconds:.1f} s, "
            f"staleness {status.mean_staleness:.2f}, most {status.max_staleness}",
            flush=True,
        )
    else:

        def loss(model: nn.Module, step: int) -> Tensor:
            return workload.loss(model, step, rank)

        stats = ps.run(
            workload.model,
            lambda step: step,  # the batch of a number: here the number itself, from which the workload draws
            loss,
            server=f"{os.environ['MASTER_ADDR']}:{PORT}",
            node_id=rank,
            slowdown=4.0 if rank == size - 1 else 1.0,
        )
        print(f"{stats.submissions} gradients, last loss {stats.losses[-1][1]:.3f}", flush=True)


if __name__ == "__main__":
    main()
