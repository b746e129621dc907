"""What is run on the simulated card: every method with its main options, and every way through the engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from training import SECOND, Conv, Net, training, two_cards
from worlds import EVERY, label
from wrapped import ddp, fsdp2, fsdp2_scatter

from thinwire.core.methods.dgc import DGC
from thinwire.core.methods.sign import SignSGD
from thinwire.core.methods.topk import TopK
from thinwire.core.pricing.costs import Costs
from thinwire.core.pricing.plans import needs_measurement
from thinwire.engine.local.settings import Nesterov
from thinwire.systems.optim import LAMB, LARS

STEPS = 6
"""Two exact ones, the first two of the method, two that are like all others: low rank takes turns."""

Case = Callable[..., AbstractContextManager[Any]]
_low = {"rank": 2, "min_rate": 1.0}
_costs = Costs.of_link(1e9, 50e-6, 4)  # what is not measured in the steps that are counted
_kfac = {"factor_update_steps": 1, "inv_update_steps": 2, "costs": _costs}

LOCAL = {"sync_every": 2, "codec": "int8"}
DILOCO = {
    "sync_every": 3, "codec": "int8", "fragments": 2, "fragment_sync_delay": 2, "start_compression_step": 0,
}  # fmt: skip


def _equal() -> nn.Module:
    return nn.Sequential(*(nn.Linear(24, 24) for _ in range(4)))


def _plain(parameters: Any) -> torch.optim.Optimizer:
    """DGC brings the momentum."""
    return torch.optim.SGD(parameters, lr=0.1)


METHODS: dict[str, Case] = {
    label(m): partial(
        training,
        m,
        **({"optimizer": _plain} if isinstance(m, DGC) else {"nodes": 2} if m.name == "hitopk" else {}),
        **({"costs": _costs} if needs_measurement(m) else {}),
    )
    for m in [
        *EVERY,
        *(TopK(0.1, select=how) for how in ("mstopk", "gaussian", "threshold")),
        TopK(0.1, exchange="gtopk"),
        SignSGD(vote="majority", error_feedback=False),
    ]
}

WAYS: dict[str, Case] = {
    "bf16": partial(training, "ssgd", dtype=torch.bfloat16),
    "topk in bf16": partial(training, "topk", density=0.1, dtype=torch.bfloat16),
    "two passes": partial(training, "ssgd", passes=2),
    "two passes of acp": partial(training, "acp", passes=2, **_low),
    "scaler": partial(training, "ssgd", scaled=True),
    "scaler and acp": partial(training, "acp", scaled=True, **_low),
    "scaler and dear": partial(training, "dear", scaled=True),
    "clip": partial(training, "ssgd", clip=1.0),
    "clip and dear": partial(training, "dear", clip=1.0),
    "clip, scaler and decoupled acp": partial(training, "acp", decoupled=True, clip=1.0, scaled=True, **_low),
    "gradients of their own": partial(training, "ssgd", gradient_as_bucket_view=False),
    "unused": partial(training, "ssgd", find_unused_parameters=True),
    "unused and topk": partial(training, "topk", density=0.1, find_unused_parameters=True),
    "unused and dear": partial(training, "dear", find_unused_parameters=True),
    "unused by all": partial(training, "ssgd", model=partial(Net, short=True)),
    "unused by all, dear": partial(training, "dear", model=partial(Net, short=True)),
    "dear, checked": partial(training, "dear", poison_stale=True),
    "dear, eager": partial(training, "dear", update_in_step=True),
    "dear, one layer eager": partial(training, "dear", update_in_step=("last",)),
    "dear without guard": partial(training, "dear", check_finite=False),
    "one bucket each": partial(training, "ssgd", fusion="none"),
    "one bucket each, dear": partial(training, "dear", fusion="none"),
    "one bucket each, topk": partial(training, "topk", density=0.1, fusion="none"),
    "torus": partial(training, "ssgd", collective="torus", nodes=2),
    "three phases": partial(training, "ssgd", collective="three_phase", nodes=2),
    "adaptive": partial(training, "ssgd", plan="adaptive", costs=_costs),
    "buffers": partial(training, "ssgd", model=Conv),
    "buffers, not rank 0": partial(training, "ssgd", model=Conv, rank=1),
    "LARS": partial(training, "ssgd", optimizer=partial(LARS, lr=0.1)),
    "LAMB": partial(training, "ssgd", optimizer=partial(LAMB, lr=0.1)),
    "LARS and dear": partial(training, "dear", optimizer=partial(LARS, lr=0.1)),
    "K-FAC": partial(training, "ssgd", kfac=_kfac),
    "K-FAC, two passes": partial(training, "ssgd", kfac=_kfac, passes=2),
    "K-FAC and acp": partial(training, "acp", kfac=_kfac, **_low),
    "K-FAC, scaler": partial(training, "ssgd", kfac=_kfac, scaled=True),
    "K-FAC, convolutions": partial(training, "ssgd", kfac=_kfac, model=Conv),
    "K-FAC, layers of one shape": partial(training, "ssgd", kfac=_kfac, model=_equal),
    "K-FAC, split": partial(training, "ssgd", kfac={**_kfac, "method": "inverse_pi"}),
    "K-FAC, eigen": partial(training, "ssgd", kfac={**_kfac, "method": "eigen"}),
    "K-FAC, dkfac": partial(training, "ssgd", kfac={**_kfac, "schedule": "dkfac"}),
    "K-FAC, mpd": partial(training, "ssgd", kfac={**_kfac, "schedule": "mpd"}),
    "K-FAC, kaisa": partial(training, "ssgd", kfac={**_kfac, "schedule": "kaisa:1/2"}),
    "K-FAC, dp": partial(training, "ssgd", kfac={**_kfac, "schedule": "dp"}),
    "cuda:1": partial(training, "ssgd", device=SECOND),
    "cuda:1, dear": partial(training, "dear", device=SECOND),
    "cuda:1, topk": partial(training, "topk", density=0.1, device=SECOND),
    "cuda:1, adaptive": partial(training, "ssgd", plan="adaptive", costs=_costs, device=SECOND),
    "cuda:1, K-FAC": partial(training, "ssgd", kfac=_kfac, device=SECOND),
    "two cards": partial(two_cards, "ssgd"),
    "two cards, dear": partial(two_cards, "dear"),
    "two cards, topk": partial(two_cards, "topk", density=0.1, select="threshold"),
    "two cards, acp": partial(two_cards, "acp", **_low),
    "local": partial(training, "local", **LOCAL),
    "local, late": partial(training, "local", **LOCAL, fragments=2, fragment_sync_delay=1, look=0.5),
    "local, in host memory": partial(training, "local", **LOCAL, anchors="cpu", outer=Nesterov()),
    "local, late, in host memory": partial(
        training, "local", **LOCAL, fragments=2, fragment_sync_delay=1, look=0.5, anchors="cpu"
    ),
    "diloco, late, in host memory": partial(training, "diloco", **DILOCO, anchors="cpu"),
    "DDP": partial(ddp, "ssgd"),
    "DDP, topk": partial(ddp, "topk", density=0.1),
    "DDP, acp": partial(ddp, "acp", **_low),
    "DDP, qsgd": partial(ddp, "qsgd"),
    "FSDP2": partial(fsdp2, "ssgd"),
    "FSDP2, topk": partial(fsdp2, "topk", density=0.1),
    "FSDP2, acp": partial(fsdp2, "acp", **_low),
    "FSDP2, scatter in bf16": partial(fsdp2_scatter, "cast", dtype="bf16"),
    "FSDP2, scatter in int8": partial(fsdp2_scatter, "cast", dtype="int8"),
}

CASES = {**METHODS, **WAYS}
WAITING = [name for name in WAYS if name.startswith(("unused", "K-FAC", "cuda:1, K-FAC", "local", "diloco"))]
"""Those whose steps wait for the card: to learn what no rank has used, what cannot be inverted, if a round counts."""
