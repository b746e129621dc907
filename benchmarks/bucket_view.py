"""What it is worth that ``.grad`` is the bucket's memory: ``python benchmarks/bucket_view.py``

``ssgd`` with ``gradient_as_bucket_view=True`` (the default, memory that the next backward overwrites) and False (memory
of its own, as under DDP's default), beside DDP with both, in turns; the median of several runs. Prints seconds a step
and writes ``benchmarks/results/bucket_view.json``.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

import in_lab
import thinwire
from thinwire.tools.bench.models.workload import Workload
from thinwire.tools.bench.trainer import Trainer

RESULTS = Path(__file__).parent / "results" / "bucket_view.json"
ROWS = {
    f"bucket_view:{kind}:view={view}": f"{name}, {memory}"
    for kind, name in (("attached", "ssgd"), ("wrapped", "DDP"))
    for view, memory in (("true", "reused"), ("false", "own"))
}


def attached(workload: Workload, group: Any, view: bool) -> Trainer:
    """A row of ``attach``."""
    optimizer = workload.optimizer(workload.model)
    sync = thinwire.attach(workload.model, optimizer, "ssgd", process_group=group, gradient_as_bucket_view=view)
    return Trainer(workload.model, optimizer, sync.close)


def wrapped(workload: Workload, group: Any, view: bool) -> Trainer:
    """A row of DDP."""
    ddp = DistributedDataParallel(workload.model, process_group=group, gradient_as_bucket_view=view)
    return Trainer(ddp, workload.optimizer(workload.model))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="chargpt,resnet18")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    found = []
    for model in options.models.split(","):
        seconds: dict[str, list[float]] = {name: [] for name in ROWS.values()}
        for _ in range(options.runs):
            result = in_lab.run(model, ",".join(ROWS), 2, None, steps=options.steps, rounds=2)
            if bad := [row.error for row in result.rows if row.error]:
                raise SystemExit(bad[0])
            for name, row in zip(ROWS.values(), result.rows[1:]):  # the first is compute alone
                seconds[name].append(row.step_seconds)
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        print(model, {name: round(x, 4) for name, x in medians.items()})
        found.append({"model": model, "seconds": seconds, "ratio": medians["ssgd, reused"] / medians["ssgd, own"]})
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
