"""Golden trajectories of LARS and LAMB: a tiny fixed problem, ten steps. Written by this file, run.

A change of these numbers is a change of what users train: regenerate only with a reason, and say it in the commit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire.systems.optim import LAMB, LARS, warmup_poly

HERE = Path(__file__).parent
STEPS = 10
CASES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "lars": (LARS, {"lr": 0.9, "weight_decay": 0.01, "trust_coefficient": 0.1}),
    "lars_scaled_gradient": (
        LARS,
        {"lr": 0.9, "momentum_holds": "scaled_gradient", "nesterov": True, "trust_coefficient": 0.1},
    ),
    "lamb": (LAMB, {"lr": 0.05}),
    "lamb_all_adapted": (LAMB, {"lr": 0.05, "adapt_all": True, "weight_decay": 0.0, "max_grad_norm": None}),
}


def trajectory(case: str) -> dict[str, list[float]]:
    """Loss and learning rate before every step, and two parameters after it (fp64)."""
    make, options = CASES[case]
    # Inputs by formula, not from a random generator, so that they are the same with every version of torch.
    rows, columns = torch.arange(24.0).double()[:, None], torch.arange(8.0).double()[None]
    x = torch.sin(1.7 * rows + 0.9 * columns + 0.13 * rows * columns)
    y = torch.cos(0.5 * rows + 0.7 * torch.arange(5.0).double())
    net = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 5)).double()
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.copy_(
                torch.sin(torch.arange(float(p.numel())).double() + i).view(p.shape) / 2 if p.dim() > 1 else 0.0 * p
            )
    optimizer = make(net.parameters(), **options)  # type: ignore[call-arg]
    schedule = warmup_poly(optimizer, total_steps=STEPS, warmup_steps=3)
    record: dict[str, list[float]] = {"loss": [], "lr": [], "weight": [], "bias": []}
    for _ in range(STEPS):
        loss = (net(x) - y).square().mean()
        loss.backward()
        record["loss"].append(loss.item())
        record["lr"].append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        record["weight"].append(net[0].weight[3, 2].item())
        record["bias"].append(net[2].bias[1].item())
    return record


def path(case: str) -> Path:
    """Where a trajectory is kept."""
    return HERE / f"optim_{case}.json"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in CASES:
        path(case).write_text(json.dumps(trajectory(case), indent=1) + "\n")
        print(path(case))
