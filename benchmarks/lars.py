"""What a step of LARS and LAMB costs beside torch's foreach SGD and AdamW: ``python benchmarks/lars.py``.

On the shapes of a ResNet-50 and of BERT-base, one thread, optimizers in turns, median of ``--steps`` steps each. Prints
a table and writes ``benchmarks/results/lars.json``. A ratio above 1 is a loss: that is the price of the norms.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from thinwire.optim import LAMB, LARS
from thinwire.planner.profiles import builtin

RESULTS = Path(__file__).parent / "results" / "lars.json"
LIMIT = 1.5  # of LARS against SGD, ResNet-50
ROWS: dict[str, tuple[str, Callable[[Any], torch.optim.Optimizer]]] = {
    "SGD": ("SGD", lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9, weight_decay=1e-4, foreach=True)),
    "LARS": ("SGD", lambda p: LARS(p, 1e-4, weight_decay=1e-4)),
    "LARS, Nesterov": ("SGD", lambda p: LARS(p, 1e-4, weight_decay=1e-4, nesterov=True)),
    "AdamW": ("AdamW", lambda p: torch.optim.AdamW(p, lr=1e-4, foreach=True)),
    "LAMB": ("AdamW", lambda p: LAMB(p, 1e-4)),
}


def parameters(model: str, device: torch.device) -> list[torch.nn.Parameter]:
    draw = torch.Generator(device).manual_seed(0)
    made = []
    for tensor in builtin(model).tensors:
        p = torch.nn.Parameter(torch.randn(tensor.shape, generator=draw, device=device))
        p.grad = torch.randn(tensor.shape, generator=draw, device=device)
        made.append(p)
    return made


def seconds(optimizer: torch.optim.Optimizer, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(model: str, steps: int, device: torch.device) -> list[dict[str, Any]]:
    made = {name: make(parameters(model, device)) for name, (_, make) in ROWS.items()}
    times: dict[str, list[float]] = {name: [] for name in ROWS}
    for step in range(steps + 2):
        for name, optimizer in made.items():
            took = seconds(optimizer, device)
            if step >= 2:  # state is made, memory is warm
                times[name].append(took)
    median = {name: statistics.median(found) for name, found in times.items()}
    del made
    gc.collect()
    return [
        {
            "model": model,
            "optimizer": name,
            "seconds": median[name],
            "beside": base,
            "ratio": median[name] / median[base],
        }
        for name, (base, _) in ROWS.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="resnet50,bert-base")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    rows = [row for model in options.models.split(",") for row in measure(model, options.steps, device)]
    found = Table(title=f"optimizer steps on {device}, {options.threads} thread(s)")
    for name in ("model", "optimizer", "ms", "beside", "ratio"):
        found.add_column(name, justify="left" if name in ("model", "optimizer", "beside") else "right")
    for row in rows:
        found.add_row(
            row["model"], row["optimizer"], f"{row['seconds'] * 1e3:.1f}", row["beside"], f"{row['ratio']:.2f}"
        )
    Console().print(found)
    for row in rows:
        if row["model"] == "resnet50" and row["optimizer"] == "LARS":
            held = "held" if row["ratio"] <= LIMIT else "missed"
            print(f"LARS against SGD on ResNet-50's shapes: {row['ratio']:.2f}; at most {LIMIT} wanted: {held}")
    machine = {"processor": platform.processor(), "cores": os.cpu_count(), "torch": torch.__version__}
    options.out.write_text(json.dumps({"machine": machine, "device": str(device), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
