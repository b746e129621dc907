"""Selection algorithms against ``torch.topk`` and ``torch.kthvalue``: ``python benchmarks/selection.py``.

Prints a table and writes ``benchmarks/results/select.json``. Ratios are seconds of torch.topk (of |x|, unsorted) over
those of the algorithm: above 1 is faster than torch.topk, below 1 is a loss and is marked. All run in turns on the same
vector and gather their values. "recall" is the share of the exact top-k that was found.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from thinwire.core.kernels.select import ALGORITHMS, keep_count, top_k

RESULTS = Path(__file__).parent / "results" / "select.json"
TARGETS = {"threshold": 2.0}  # of torch.topk, on a CPU at 2^25 elements and density 0.001
OURS = ALGORITHMS


def heavy(d: int, device: torch.device) -> Tensor:
    """Student's t with 3 degrees of freedom: tails as those of gradients, or heavier."""
    g = torch.Generator(device).manual_seed(1)
    squares = sum(torch.randn(d, device=device, generator=g).square_() for _ in range(3))
    return torch.randn(d, device=device, generator=g).div_((squares / 3).sqrt_())


def normal(d: int, device: torch.device) -> Tensor:
    return torch.randn(d, device=device, generator=torch.Generator(device).manual_seed(1))


DATA: dict[str, Callable[[int, torch.device], Tensor]] = {"normal": normal, "heavy": heavy}


def contenders(x: Tensor, k: int) -> dict[str, Callable[[], Tensor]]:
    """Calls that return the indices of the chosen (kthvalue: of one entry)."""
    draw = torch.Generator().manual_seed(0)

    def plain() -> Tensor:
        indices = torch.topk(x.abs(), k, sorted=False).indices
        x[indices]
        return indices

    calls: dict[str, Callable[[], Tensor]] = {"torch.topk": plain}
    calls["torch.kthvalue"] = lambda: torch.kthvalue(x.abs(), x.numel() - k + 1).indices
    for name in ALGORITHMS:
        calls[name] = lambda name=name: top_k(x, k, name, draw)[1]  # type: ignore[misc]
    return calls


def seconds(call: Callable[[], Tensor], device: torch.device) -> float:
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(x: Tensor, density: float, repeats: int) -> dict[str, Any]:
    device, k = x.device, keep_count(x.numel(), density)
    calls = contenders(x, k)
    best = x.abs().topk(k).values[-1]
    recall = {}
    for name, call in calls.items():  # also warms up
        indices = call()
        if name != "torch.kthvalue":
            recall[name] = float((x[indices[indices >= 0]].abs() >= best).sum()) / k
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(seconds(call, device))
    median = {name: statistics.median(found) for name, found in times.items()}
    ratio = {name: median["torch.topk"] / t for name, t in median.items()}
    return {"elements": x.numel(), "density": density, "seconds": median, "ratio": ratio, "recall": recall}


def table(rows: list[dict[str, Any]]) -> Table:
    found = Table(title="seconds of torch.topk / seconds of ...; red: slower than torch.topk")
    for name in ("data", "elements", "density", "topk ms", "kthvalue", *OURS):
        found.add_column(name, justify="right")
    for row in rows:
        ratios = (row["ratio"][name] for name in ("torch.kthvalue", *OURS))
        found.add_row(
            row["data"], f"{row['elements']:,}", f"{row['density']:g}", f"{row['seconds']['torch.topk'] * 1e3:.2f}",
            *(f"{r:.2f}" if r >= 1 else f"[red]{r:.2f}[/red]" for r in ratios),
        )  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="16,18,20,22,25", help="exponents of 2")
    parser.add_argument("--densities", default="0.001,0.01,0.1")
    parser.add_argument("--data", default="normal,heavy")
    parser.add_argument("--repeats", type=int, default=0, help="0: 3 for the largest vectors, 21 for the smallest")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    device = torch.device(options.device)
    rows = []
    for data in options.data.split(","):
        for exponent in map(int, options.sizes.split(",")):
            x = DATA[data](1 << exponent, device)
            repeats = options.repeats or (21 if exponent <= 20 else 11 if exponent <= 22 else 3)
            for density in map(float, options.densities.split(",")):
                rows.append({"data": data, **measure(x, density, repeats)})
                print(f"... {data}, 2^{exponent}, {density:g}", file=sys.stderr, flush=True)
    console = Console(width=150)
    console.print(table(rows))
    for name in OURS:
        lost = [row for row in rows if row["ratio"][name] < 1]
        worst = min((row["ratio"][name] for row in lost), default=1.0)
        console.print(f"{name}: slower than torch.topk in {len(lost)} of {len(rows)} rows, {worst:.2f}x at worst")
    low = min(((r, row, n) for row in rows for n, r in row["recall"].items()), key=lambda found: found[0])
    console.print(f"Lowest recall: {low[0]:.3f} ({low[2]}, {low[1]['data']}, density {low[1]['density']:g})")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    machine = {"device": name, "cores": os.cpu_count(), "torch": torch.__version__, "python": platform.python_version()}
    for row in rows:
        if device.type == "cpu" and row["elements"] == 1 << 25 and row["density"] == 0.001:
            for who, target in TARGETS.items():
                ratio = row["ratio"][who]
                met = "met" if ratio >= target else "MISSED"
                console.print(f"{who}, {row['data']}, 2^25, density 0.001: {ratio:.2f}x; target {target}x: {met}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
