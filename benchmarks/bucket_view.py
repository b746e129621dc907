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
from thinwire.bench.models.workload import Workload
from thinwire.bench.trainer import Trainer

RESULTS = Path(__file__).parent / "results" / "bucket_view.json"
ROWS = ("ssgd, reused", "ssgd, own", "DDP, reused", "DDP, own")
METHODS = ",".join(f"bucket_view:{kind}:view={view}" for kind in ("attached", "wrapped") for view in ("true", "false"))


def attached(workload: Workload, group: Any, view: bool) -> Trainer:
    """A row of ``attach``."""
    optimizer = workload.optimizer(workload.model)
    sync = thinwire.attach(workload.model, optimizer, "ssgd", group=group, gradient_as_bucket_view=view)
    return Trainer(workload.model, optimizer, sync.detach)


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
        seconds: list[list[float]] = []
        for _ in range(options.runs):
            result = in_lab.run(model, METHODS, 2, None, steps=options.steps, rounds=2)
            if bad := [row.error for row in result.rows if row.error]:
                raise SystemExit(bad[0])
            seconds.append([row.step_seconds for row in result.rows])
        medians = dict(zip(ROWS, map(statistics.median, zip(*seconds))))
        gain = 1 - medians["ssgd, reused"] / medians["ssgd, own"]
        print(model, {name: round(x, 4) for name, x in medians.items()}, f"reused is {100 * gain:.1f} % faster")
        found.append({"model": model, "seconds": seconds, "rows": ROWS, "gain": gain})
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
