"""OMGS-SGD: sparsified gradients, merged as start-ups and overlap demand."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product

from thinwire.core.methods.base import Warmup
from thinwire.core.methods.ssgd import SSGD
from thinwire.core.methods.topk import TopK
from thinwire.core.pricing.merge import Merge, finish, greedy_omgs
from thinwire.core.pricing.optimal import optimal_sparse
from thinwire.core.pricing.profiles import builtin
from thinwire.systems.papers.paper import Paper, Shown, Word, curves
from thinwire.systems.papers.workbench import Workbench, losses, predicted
from thinwire.tools.pictures import Picture

FORWARD, BACKWARD, SORT = 0.09, 0.12, 2.18896957e-10
"""Seconds of ResNet-50 on a P102-100; of selection, times d log2 d; from the authors' code, HKBU-HPML/OMGS-SGD."""
STARTUP, PER_BYTE = 1.1e-2, 1.7e-8
"""Their line of an all-gather among 16 workers on 1 GbE: seconds of start-up, and of a byte that a rank receives."""
EACH = Merge([[i] for i in range(54)], 0.0, "per layer", False)
"""A message for each of ResNet-50's matrices; its vectors share messages."""
RULES = ("topk:fusion=single", "topk:fusion=none", "omgs", "topk:fusion=omgs")
TRAINED = {"S-SGD": SSGD(), "OMGS": TopK(0.01, fusion="single", warmup=Warmup(20))}


def select_2019(elements: int) -> float:
    return SORT * elements * math.log2(elements) if elements > 1 else 0.0


def simulated() -> Iterator[Shown]:
    sizes, passes = builtin("resnet50").sizes, builtin("resnet50").backward_seconds
    backward = [t * BACKWARD / sum(passes) for t in passes]
    asked = sizes, backward, select_2019, lambda n: 2 * (STARTUP + PER_BYTE * 4 * 16 * 0.001 * n)
    plans = {"greedy rule": greedy_omgs(*asked).groups, "optimum": optimal_sparse(*asked).groups}
    fixed = [list(range(len(sizes)))], [[i] for i in range(len(sizes))]
    better = min(finish(plan, sizes, backward, asked[3], select_2019) for plan in fixed)
    for key, plan in plans.items():
        gain = (FORWARD + better) / (FORWARD + finish(plan, sizes, backward, asked[3], select_2019))
        what = f"better of one group and per layer over {key} ({len(plan)}), ResNet-50, 16 workers, 1 GbE of 2019"
        yield Shown(key, what, gain, published="1.314")
    found = []
    for workers, delay, density in product((4, 16, 64), ("50us", "1ms"), (0.001, 0.01)):
        rules = {"one group": "single", "per layer": EACH, "OMGS": "optimal"}
        rows = {label: TopK(density, fusion=rule) for label, rule in rules.items()}
        steps = predicted("resnet50", rows, workers=workers, link="1gbit", delay=delay, device="t4")
        one, each, ours = (steps[label].step_seconds for label in rows)
        found.append((min(one, each) / ours, f"{workers} workers, start-up {delay}, density {density:g}"))
    for key, (gain, where) in {"least": min(found), "most": max(found)}.items():
        yield Shown(key, f"better of both over optimum, T4, 1 Gb/s, the {key} of {len(found)} cases: {where}", gain)


def measured(bench: Workbench) -> Iterator[Shown | Picture]:
    rows = ",".join([*(f"{rule}:density=0.05" for rule in RULES), "ddp"])
    found = bench.bench("resnet18:width=32", rows, workers=4, link="100mbit", rounds=6 if bench.full else 2)
    one, each, ours, greedy, dense = (row.step_seconds or math.nan for row in found.rows[1:])
    rivals = {"better of one group and per layer": min(one, each), "greedy rule": greedy, "DDP": dense}
    for key, other in rivals.items():
        what = f"{key} over OMGS, ResNet of 2.8 M, density 0.05, 4 workers, 100mbit"
        yield Shown(f"{key} measured", what, other / ours)
    lines, ratio = losses(bench, "digits", TRAINED)
    yield curves("CNN on digits, 4 workers: density 0.01 after a warm-up", "step", "held-out loss", lines)
    what = "last held-out loss, density 0.01 with warm-up over S-SGD, CNN on digits, 4 workers"
    yield Shown("loss", what, ratio["OMGS"], published="about 1")


def judge(found: Mapping[str, float]) -> tuple[Word, str]:
    there, best = found["better of one group and per layer measured"], max(found["optimum"], found["most"])
    said = (
        f"with the authors' constants of 2019 the published rule is {found['greedy rule']:.2f} times as fast as "
        f"the better of one message for all and one per layer, the exact optimum {found['optimum']:.2f} times, "
        f"and in the best of other cases {best:.2f} times. Measured, it is {there:.2f} times as fast, and its "
        f"loss {found['loss']:.2f} times S-SGD's"
    )
    if there <= 1.05 or found["loss"] > 1.1 or best < 1.1:
        return "does not hold:", said
    if found["optimum"] >= 1.25:
        return "holds", said
    return "holds where", f"one message takes about as long as backward: {said}"


PAPER = Paper(
    system="OMGS-SGD",
    title="Communication-Efficient Distributed Deep Learning with Merged Gradient Sparsification on GPUs",
    authors="S. Shi, Q. Wang, X. Chu, B. Li, Y. Qin, R. Liu, X. Zhao (INFOCOM 2020)",
    link="https://ieeexplore.ieee.org/document/9155269",
    claim="up to 31 % faster than other sparsified SGD; converges nearly as S-SGD",
    setting="CNNs and an LSTM on 16 GPUs (P102-100), 1 Gb/s Ethernet, density 0.001",
    page="methods/sparse.md#omgs",
    needs={"digits": ("sklearn",)},
    main={
        "greedy rule": "published rule, times as fast as the better fixed one, ResNet-50, 16 workers, 2019",
        "optimum": "exact optimum, the same",
        "most": "exact optimum, the best of 12 networks with T4s",
        "better of one group and per layer measured": "times as fast as the better fixed one, ResNet, 4 workers",
        "DDP measured": "times as fast as DDP, the same",
        "loss": "last loss beside S-SGD's; less is better",
    },
)
