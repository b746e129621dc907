"""Golden trajectories: a tiny fixed problem, every method, ten steps. Written by ``python tests/golden/regenerate.py``,
with names of cases for these alone.

A change of these numbers is a change of what users train: regenerate only with a reason, and say it in the commit.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from thinwire.core.methods.registry import classes, method
from thinwire.core.program import LocalWorld

HERE = Path(__file__).parent
STEPS, RANKS = 10, 3
PLAN = [["two.weight", "two.bias"], ["one.weight", "one.bias"]]
OPTIONS = {  # where the first candidate of the method, or no option, is not for so small a problem
    "qsgd": {"block": 16},
    **{name: {"density": 0.1} for name in ("topk", "gtopk", "oktopk", "hitopk", "omgs")},
    "dgc": {"density": 0.1, "select": "exact"},
    "lags": {"max_ratio": 10},
    **{name: {"rank": 2, "min_rate": 1.0} for name in ("powersgd", "acp")},
}
VARIANTS = {
    "cast_fp16": ("cast", {"dtype": "fp16"}),
    **{f"cast_int{bits}": ("cast", {"dtype": f"int{bits}", "block": 16}) for bits in (8, 4, 2, 1)},
    "signsgd_levels2": ("signsgd", {"levels": 2}),
    "signsgd_majority": ("signsgd", {"error_feedback": False, "vote": "majority"}),
    "topk_fp16": ("topk", {"density": 0.1, "value_dtype": "fp16"}),
    "ssgd_torus": ("ssgd", {"collective": "torus"}),
    "dgc_nesterov": ("dgc", {"density": 0.1, "select": "exact", "nesterov": True, "clip": 1.0, "value_dtype": "bf16"}),
}
LAYOUTS = {"ssgd_torus": (4, 2), "hitopk": (4, 2)}  # ranks in all, and on each node


def cases() -> dict[str, tuple[str, dict[str, Any]]]:
    """Name and options of every case: each registered method, and the variants."""
    first = {name: dict(next(iter(cls.candidates), {})) for name, cls in classes().items()}
    return {name: (name, OPTIONS.get(name, options)) for name, options in first.items()} | VARIANTS


def trajectory(case: str) -> dict[str, list[float]]:
    """Loss before every step, and the norm of rank 1's residual and two parameters after it (fp64)."""
    name, options = cases()[case]
    ranks, per_node = LAYOUTS.get(case, (RANKS, None))
    made, world = method(name, **options), LocalWorld(ranks, per_node, plan=PLAN)
    # Inputs by formula, not from a random generator, so that they are the same with every version of torch.
    rows, columns = torch.arange(24.0).double()[:, None], torch.arange(8.0).double()[None]
    x = torch.sin(1.7 * rows + 0.9 * columns + 0.13 * rows * columns)
    y = torch.cos(0.5 * rows + 0.7 * torch.arange(5.0).double())
    parameters = {
        "one.weight": torch.sin(torch.arange(96.0).double()).view(12, 8) / 2,
        "one.bias": torch.zeros(12).double(),
        "two.weight": torch.cos(torch.arange(60.0).double()).view(5, 12) / 2,
        "two.bias": torch.zeros(5).double(),
    }
    rate = 0.002 if "majority" in case else 0.1
    record: dict[str, list[float]] = {"loss": [], "residual": [], "one": [], "two": []}
    for _ in range(STEPS):
        gradients, losses = [], []
        for part_x, part_y in zip(x.chunk(ranks), y.chunk(ranks)):
            leaves = {key: value.clone().requires_grad_() for key, value in parameters.items()}
            hidden = torch.tanh(part_x @ leaves["one.weight"].T + leaves["one.bias"])
            loss = (hidden @ leaves["two.weight"].T + leaves["two.bias"] - part_y).square().mean()
            loss.backward()
            losses.append(loss.item())
            gradients.append({key: leaf.grad for key, leaf in leaves.items()})
        averaged = world.step(made, gradients)[0]
        parameters = {key: value - rate * averaged[key] for key, value in parameters.items()}
        residual = sum(r.square().sum().item() for r in world.residuals()[1].values()) ** 0.5
        record["loss"].append(sum(losses) / ranks)
        record["residual"].append(residual)
        record["one"].append(parameters["one.weight"][3, 2].item())
        record["two"].append(parameters["two.weight"][1, 7].item())
    return record


def path(case: str) -> Path:
    """Where a trajectory is kept."""
    return HERE / f"{case}.json"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in sys.argv[1:] or cases():
        path(case).write_text(json.dumps(trajectory(case), indent=1) + "\n")
        print(path(case))
