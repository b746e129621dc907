"""CPU time of the quantisers beside earlier commits: ``python benchmarks/encode_time.py``

The programs of four ranks in one process, on one thread, without a network: what one rank's own work takes in a step,
in seconds of the processor. The source of the commit before a method was last made faster and this tree's run in turns,
in processes of their own: the median step of each, and of ``--runs`` such medians the middle one. Writes
``benchmarks/results/encode_time.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

try:
    from thinwire.core.methods.registry import method as named
    from thinwire.core.pricing.merge import fuse
    from thinwire.core.pricing.profiles import builtin
    from thinwire.core.program import Bucket, Method, Program, Slot, State, Topology
    from thinwire.core.program.local_world import run_lockstep
    from thinwire.tools.bench.models.registry import build_model
except ImportError:  # the commits that are compared with
    from thinwire.bench.models.registry import build_model
    from thinwire.methods.registry import method as named
    from thinwire.planner.merge import fuse
    from thinwire.planner.profiles import builtin
    from thinwire.program import Bucket, Method, Program, Slot, State, Topology
    from thinwire.program.lockstep import run_lockstep

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "encode_time.json"
RANKS = 4
BY_TENSOR = "5e7c5e7"  # when each tensor was encoded and decoded by itself
MANY_PASSES = "9865306"  # when the bytes of 4 and 2 bits were looked up, and sums of bins came from histograms
METHODS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "cast int8": (MANY_PASSES, "cast", {"dtype": "int8"}),
    "cast int4": (MANY_PASSES, "cast", {"dtype": "int4"}),
    "cast int2": (MANY_PASSES, "cast", {"dtype": "int2"}),
    "qsgd": (MANY_PASSES, "qsgd", {}),
    "signsgd": (BY_TENSOR, "signsgd", {}),
    "signsgd vote=majority": (BY_TENSOR, "signsgd", {"vote": "majority", "error_feedback": False}),
    "onebit": (BY_TENSOR, "onebit", {}),
    "terngrad": (BY_TENSOR, "terngrad", {}),
}


def shapes(model: str) -> list[tuple[int, ...]]:
    """In the order in which backward brings them."""
    if model in ("resnet50", "gpt2"):
        return [tuple(tensor.shape) for tensor in builtin(model).tensors]
    return [tuple(p.shape) for p in reversed(list(build_model(model).model.parameters()))]


class Clock:
    """Seconds of the processor that programs have taken."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, program: Program) -> Program:
        """The same program."""
        value: Any = None
        while True:
            start = time.process_time()
            try:
                op = program.send(value)
            except StopIteration:
                return
            finally:
                self.seconds += time.process_time() - start
            value = yield op


def steps(method: Method, sizes: list[tuple[int, ...]], limit: float) -> Iterator[float]:
    """Seconds of one rank in a step, step after step, with buckets of at most ``limit`` bytes; 0: one per tensor."""
    draw, device = torch.Generator().manual_seed(0), torch.device("cpu")
    groups = fuse([4 * torch.Size(shape).numel() for shape in sizes], limit)
    states = [State(rank, Topology(RANKS)) for rank in range(RANKS)]
    gradients = [torch.randn(shape, generator=draw) for shape in sizes]
    made = [
        [Bucket(i, [Slot(f"{j}", sizes[j], None, torch.float32, device) for j in group]) for _ in states]
        for i, group in enumerate(groups)
    ]
    while True:
        clock = Clock()
        for group, buckets in zip(groups, made):
            programs = []
            for bucket, state in zip(buckets, states):  # kept from step to step, as the engine does
                for slot, j in zip(bucket.slots, group):
                    slot.value, slot.result = gradients[j] * (1.0 + state.rank), None
                bucket.renew(None)
                programs.append(clock.watch(method.reduce(bucket, state)))
            run_lockstep(programs, states[0].topology)
        for state in states:
            state.end_step()
        yield clock.seconds / RANKS


def child(model: str, before: str, mib: float, rounds: int) -> dict[str, float]:
    """Seconds of each method that is held against one commit, with the source that this process has imported."""
    torch.set_num_threads(1)
    # As the engine does, for which old commits have no function: glibc keeps memory once such a block was freed.
    torch.empty(31 << 20, dtype=torch.uint8)
    found = {}
    for label, (commit, name, options) in METHODS.items():
        if commit != before:
            continue
        running = steps(named(name, **options), shapes(model), mib * 2**20)
        times = [next(running) for _ in range(rounds + 2)]
        found[label] = statistics.median(times[2:])  # the first two make residuals
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet50,chargpt")
    parser.add_argument("--mib", type=float, default=25.0, help="of a bucket")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.models, options.child, options.mib, options.steps)))
        return
    rows = []
    table = Table(title="milliseconds of one rank's processor in a step")
    for name in ("model", "tensors", "method", "before", "now", "ratio"):
        table.add_column(name, justify="right")
    for commit in dict.fromkeys(commit for commit, *_ in METHODS.values()):
        with tempfile.TemporaryDirectory() as folder:
            packed = subprocess.run(["git", "archive", commit, "src"], cwd=ROOT, check=True, stdout=subprocess.PIPE)
            subprocess.run(["tar", "-x", "-C", folder], input=packed.stdout, check=True)
            sources = {"before": Path(folder) / "src", "now": ROOT / "src"}
            for model in options.models.split(","):
                runs: dict[str, list[dict[str, float]]] = {name: [] for name in sources}
                for _ in range(options.runs):
                    for name, source in sources.items():
                        command = [sys.executable, __file__, "--child", commit, "--models", model]
                        environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
                        done = subprocess.run(
                            [*command, "--mib", str(options.mib), "--steps", str(options.steps)],
                            env=environment, check=True, stdout=subprocess.PIPE, text=True,
                        )  # fmt: skip
                        runs[name].append(json.loads(done.stdout.splitlines()[-1]))
                for label in runs["now"][0]:
                    seconds = {name: [run[label] for run in found] for name, found in runs.items()}
                    before, now = (statistics.median(times) for times in seconds.values())
                    rows.append(
                        {"model": model, "method": label, "before": commit, "seconds": seconds, "ratio": now / before}
                    )
                    table.add_row(
                        model, str(len(shapes(model))), label, f"{1e3 * before:.1f}", f"{1e3 * now:.1f}",
                        f"{now / before:.2f}",
                    )  # fmt: skip
    Console().print(table)
    RESULTS.write_text(json.dumps({"ranks": RANKS, "mib": options.mib, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
