"""CPU time of a step, beside an earlier commit's: ``python benchmarks/step_cpu.py --before 105ad2a``

Two Gloo ranks on this machine train a small network by ``attach``. What counts is the processor time of all threads of
rank 0 from step to step, so the network hardly does. The source of ``--before`` and this tree's run in turns, in
processes of their own: the median step of each run, and of ``--runs`` such medians the middle one. Writes
``benchmarks/results/step_cpu.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import thinwire as tw

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "step_cpu.json"
METHODS: dict[str, Any] = {  # without the measured plans and late beginnings of the defaults
    "ssgd": tw.SSGD(fusion=1.0),
    "powersgd": tw.PowerSGD(fusion=1.0),
    "int8": tw.Cast(dtype="int8", fusion=1.0),
    "local int8": tw.Local(sync_every=1, codec=tw.Cast(dtype="int8"), fragment_sync_delay=0),
}
WARM, STEPS = 40, 150


def rank(label: str) -> float:
    """Median processor seconds of a step, on one of the ranks whose variables torchrun would set."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(96, 96), nn.ReLU()) for _ in range(24)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    begin = {} if label == "local int8" else {"start_compression_step": 0}
    sync = tw.attach(net, optimizer, METHODS[label], **begin)
    x, times = torch.randn(16, 96), []
    for _ in range(WARM + STEPS):
        start = time.process_time()
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
        times.append(time.process_time() - start)
    sync.close()
    torch.distributed.destroy_process_group()
    return statistics.median(times[WARM:])


def run(label: str, source: Path) -> float:
    """Rank 0's seconds, with that source."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--child", label],
            env={**os.environ, **meet, "RANK": str(r), "LOCAL_RANK": str(r), "PYTHONPATH": str(source)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for r in range(2)
    ]
    said = [process.communicate()[0] for process in ranks]
    if any(process.returncode for process in ranks):
        raise SystemExit(f"{label} failed with the source in {source}")
    return float(said[0].split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default="105ad2a", help="commit to compare with")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(rank(options.child))
        return
    rows = []
    table = Table(title="milliseconds of rank 0's processor in a step")
    for name in ("method", options.before, "now", "ratio"):
        table.add_column(name, justify="right")
    with tempfile.TemporaryDirectory() as folder:
        packed = subprocess.run(["git", "archive", options.before, "src"], cwd=ROOT, check=True, stdout=subprocess.PIPE)
        subprocess.run(["tar", "-x", "-C", folder], input=packed.stdout, check=True)
        sources = {"before": Path(folder) / "src", "now": ROOT / "src"}
        for label in options.methods.split(","):
            seconds: dict[str, list[float]] = {name: [] for name in sources}
            for _ in range(options.runs):
                for name, source in sources.items():
                    seconds[name].append(run(label, source))
            before, now = (statistics.median(times) for times in seconds.values())
            rows.append({"method": label, "before": options.before, "seconds": seconds, "ratio": now / before})
            table.add_row(label, f"{1e3 * before:.2f}", f"{1e3 * now:.2f}", f"{now / before:.2f}")
    Console().print(table)
    RESULTS.write_text(json.dumps({"ranks": 2, "steps": STEPS, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
