"""All that is measured on a GPU, in one command: ``python benchmarks/gpu/all.py --seconds 420``.

In the order of their worth, each only if the time is left: the kernels beside the floor, steps that only exchange, the
bench over emulated links, whether everything is right (``make gpu``), whole runs. Results go to ``benchmarks/results``
as soon as they are there, with card, driver and versions; docs/gpu.md is made from them. Without a card the same
scripts run small, so that they are known to work on the day of a card; what they write goes to ``thinwire-out/gpu``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from machine import DEVICE

HERE = Path(__file__).resolve().parent
TOP = HERE.parents[1]
ON_GPU = DEVICE.type == "cuda"
RESULTS, OTHERS = HERE.parent / "results", Path("thinwire-out").resolve() / "gpu"
LINKS = {"10gbit": "gpu_bench_10gbit.json", "1gbit": "gpu_bench.json"}
MODEL = "chargpt:layers=8:width=512:heads=8:block=256:batch=16" if ON_GPU else "chargpt:layers=1:width=32:heads=2"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
ROWS = "ddp,torch-powersgd:rank=4,ssgd,cast:dtype=bf16,cast:dtype=int4,powersgd:rank=4,acp:rank=4,local"


Part = tuple[str, list[str], float, Path | None]


def parts(out: Path, left: Callable[[], float]) -> Iterator[Part]:
    """What it is, its command, the seconds without which it is not begun, and the file that keeps what it prints."""
    python, ours = [sys.executable], ["--out", str(out), "--seconds"]
    ranks = str(max(2, min(8, torch.cuda.device_count() if ON_GPU else 2)))
    launch = [*python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    bench = [*python, "-m", "thinwire", "bench", "--model", MODEL, "--workers", "2", "--device", DEVICE.type]
    bench += ["--methods", ROWS, "--steps", "10", "--rounds", "2", "--json"]
    yield "kernels", [*python, str(HERE / "kernels.py"), "--out", str(out)], 60, None
    yield "exchange", [*launch, str(HERE / "exchange.py"), *ours, str(left() / 3)], 60, None
    for link, file in LINKS.items():
        yield f"bench at {link}", [*bench, "--link", link], 60, out / file
    if ON_GPU:
        yield "correctness", [*python, str(TOP / "tests" / "gpu" / "gpu_report.py")], 90, None
    yield "whole runs", [*python, str(HERE / "long_runs.py"), *ours, str(left() - 10)], 120, None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=420.0, help="end after these")
    end = time.monotonic() + parser.parse_args().seconds
    out = RESULTS if ON_GPU else OTHERS
    out.mkdir(parents=True, exist_ok=True)
    failed = []
    for name, command, needed, kept in parts(out, lambda: end - time.monotonic()):
        left = end - time.monotonic()
        if left < (needed if ON_GPU else 0):
            print(f"{name}: left out, {left:.0f} s are left and it takes {needed:.0f}", flush=True)
            continue
        began = time.monotonic()
        try:
            done = subprocess.run(
                command,
                cwd=TOP,
                timeout=max(left, 1),
                stdout=subprocess.PIPE if kept else None,
                text=True,
                env=ENVIRONMENT,
            )
            code: int | None = done.returncode
        except subprocess.TimeoutExpired:
            code = None  # what it has written stays
        if kept and code == 0:
            kept.write_text(done.stdout)
        said = {0: "done", None: "out of time"}.get(code, f"failed with exit status {code}")
        print(f"{name}: {said} in {time.monotonic() - began:.0f} s", flush=True)
        if code:
            failed.append(name)
    report = TOP / "thinwire-out" / "gpu.json"
    if ON_GPU and report.exists():
        shutil.copy(report, RESULTS / "gpu.json")
    print(f"results are in {out}; compare with git diff" if ON_GPU else f"no card: small runs, written to {out}")
    sys.exit(", ".join(failed) + " failed" if failed else 0)


if __name__ == "__main__":
    main()
