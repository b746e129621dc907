"""What a step of LARS and LAMB costs beside torch's foreach SGD and AdamW: ``python benchmarks/lars.py``.

On the shapes of a ResNet-50 and of BERT-base, one thread, all optimizers in turns: medians of ``--steps`` steps, and of
``--rounds`` such medians the middle ratio, the lowest and the highest. A ratio above 1 is a loss: that is the price of
the norms. Then how far the layers' rates are from those in float64. Writes ``benchmarks/results/lars.json``.
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

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from thinwire.core.pricing.profiles import builtin
from thinwire.systems.optim import LAMB, LARS
from thinwire.systems.optim.norms import Layers, Rule, trust_ratios

RESULTS = Path(__file__).parent / "results" / "lars.json"
LIMIT = 1.5  # of LARS against SGD, ResNet-50
CLOSE = 1e-6  # of rates to float64
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


def measure(model: str, steps: int, rounds: int, device: torch.device) -> list[dict[str, Any]]:
    made = {name: make(parameters(model, device)) for name, (_, make) in ROWS.items()}
    for optimizer in made.values():
        for _ in range(2):  # state is made, memory is warm
            optimizer.step()
    medians: list[dict[str, float]] = []
    for _ in range(rounds):
        times: dict[str, list[float]] = {name: [] for name in ROWS}
        for _ in range(steps):
            for name, optimizer in made.items():
                times[name].append(seconds(optimizer, device))
        medians.append({name: statistics.median(found) for name, found in times.items()})
    del made
    gc.collect()
    ratios = {name: sorted(found[name] / found[base] for found in medians) for name, (base, _) in ROWS.items()}
    return [
        {
            "model": model,
            "optimizer": name,
            "seconds": statistics.median(found[name] for found in medians),
            "beside": base,
            "ratio": statistics.median(ratios[name]),
            "lowest": ratios[name][0],
            "highest": ratios[name][-1],
        }
        for name, (base, _) in ROWS.items()
    ]


def rate_error(model: str) -> float:
    """The largest relative difference between a layer's rate and the same formula in float64, by numpy."""
    layers = [p for p in parameters(model, torch.device("cpu")) if p.dim() > 1]
    rule = Rule(0.001, 1e-4)
    found = trust_ratios(Layers([p.detach() for p in layers], [p.grad for p in layers], rule)).double().numpy()
    norms = [[np.linalg.norm(x.detach().double().numpy().ravel()) for x in (p, p.grad)] for p in layers]
    exact = np.array([rule.coefficient * w / (g + rule.decay * w) for w, g in norms])
    return float(np.abs(found / exact - 1).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="resnet50,bert-base")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    models = options.models.split(",")
    rows = [row for model in models for row in measure(model, options.steps, options.rounds, device)]
    found = Table(title=f"optimizer steps on {device}, {options.threads} thread(s)")
    for name in ("model", "optimizer", "ms", "beside", "ratio", "lowest", "highest"):
        found.add_column(name, justify="left" if name in ("model", "optimizer", "beside") else "right")
    for row in rows:
        found.add_row(
            row["model"], row["optimizer"], f"{row['seconds'] * 1e3:.1f}", row["beside"],
            *(f"{row[name]:.2f}" for name in ("ratio", "lowest", "highest")),
        )  # fmt: skip
    Console().print(found)
    for row in rows:
        if row["model"] == "resnet50" and row["optimizer"] == "LARS":
            held = "held" if row["ratio"] <= LIMIT else "missed"
            print(f"LARS against SGD on ResNet-50's shapes: {row['ratio']:.2f}; at most {LIMIT} wanted: {held}")
    errors = {model: rate_error(model) for model in models}
    for model, error in errors.items():
        print(f"{model}: a layer's rate differs from float64 by at most {error:.1e}; at most {CLOSE:.0e} wanted")
    machine = {"processor": platform.processor(), "cores": os.cpu_count(), "torch": torch.__version__}
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(
        json.dumps({"machine": machine, "device": str(device), "rows": rows, "rate_errors": errors}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
