"""DeAR: the all-reduce in two halves, one behind backward, one behind the next forward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from thinwire.predict.tune import FusionTuner, grid
from thinwire.systems.papers.paper import Paper, Shown, Word
from thinwire.systems.papers.workbench import Workbench, predicted

BATCH = {"resnet50": 64, "densenet201": 32, "bert-base": 64, "bert-large": 32}
"""Samples a GPU, as in the authors' script (lzhangbv/dear_pytorch, benchmarks.py); Inception-v4 has no profile here."""
FLOPS = 7e12
"""What a 2080 Ti sustains in training: assumed, half of its fp32 peak."""
LINKS = {"10gbit": ("1.83", "50us"), "100gbit": ("1.15", "20us")}
RIVALS = {"WFBP, no fusion": "ssgd:fusion=none", "DDP, 25 MB": "ssgd:fusion=25", "Horovod, 64 MB": "ssgd:fusion=64",
          "MG-WFBP": "ssgd:fusion=mgwfbp"}  # fmt: skip
BUCKETS = [f"ssgd:fusion={size}" for size in (10, 25, 64, 100, "single", "optimal")]
FIXED = 25.0
"""MiB at which the tuner begins."""
MODEL = "chargpt:layers=4:width=256:heads=4:batch=4"
ROWS = {"DDP, 25 MB": "ddp", "DDP, best bucket": "ddp-best", "WFBP, no fusion": "ssgd:fusion=none",
        "MG-WFBP": "ssgd:fusion=mgwfbp"}  # fmt: skip


def tuned(seconds: Mapping[float, float]) -> tuple[float, int]:
    """Return the seconds of the limit that the tuner keeps, and how many steps it tries."""
    tuner, trials = FusionTuner([*seconds], FIXED), 0
    while not tuner.done:
        tuner.tell(limit := tuner.ask(), seconds[limit])
        trials += 1
    return seconds[tuner.best()], trials


def simulated() -> Iterator[Shown]:
    """The bound: an exchange of c seconds, a forward of 1, a backward of 2, no start-ups."""
    bound = max((1 + max(2, c)) / (max(1, c / 2) + max(2, c / 2)) for c in range(1, 20))
    yield Shown("bound", "most by bandwidth alone, backward twice as long as forward", bound)
    ours = {limit: f"dear:fusion={limit}" for limit in (FIXED, *grid(FIXED))}
    rows = ",".join(dict.fromkeys([*RIVALS.values(), *BUCKETS, *ours.values()]))
    for link, (published, latency) in LINKS.items():
        most = dict.fromkeys([*RIVALS, "best bucket", "25 MB of its own", "trials"], 0.0)
        for model, batch in BATCH.items():
            steps = predicted(model, rows, workers=64, ranks_per_node=4, link=link, delay=latency, batch_size=batch,
                              device="t4", device_flops=FLOPS)  # fmt: skip
            took = {label: step.step_seconds for label, step in steps.items()}
            chosen, tried = tuned({limit: took[row] for limit, row in ours.items()})
            rivals = {label: took[row] for label, row in RIVALS.items()}
            rivals |= {"best bucket": min(took[row] for row in BUCKETS), "25 MB of its own": took[ours[FIXED]]}
            gains = {label: other / chosen for label, other in rivals.items()} | {"trials": tried}
            most = {label: max(value, gains[label]) for label, value in most.items()}
        for label, value in most.items():
            what = "measurements by DeAR's tuner" if label == "trials" else f"{label} over DeAR, tuned"
            yield Shown(f"{label} {link}", f"{what}, most of four models, 16 x 4 GPUs, {link}", value,
                        "" if label == "trials" else "x", published if label in RIVALS else "")  # fmt: skip


def measured(bench: Workbench) -> Iterator[Shown]:
    rows = ",".join([*ROWS.values(), "dear:fusion=25", "dear:fusion=tune", "dear"])
    found = bench.bench(MODEL, rows, link="500mbit", rounds=8 if bench.full else 3)
    for label, row in (ROWS | {"25 MB of its own": "dear:fusion=25", "its tuner's choice": "dear:fusion=tune"}).items():
        gain = (found.row(row.replace(":", " ")).step_seconds or 0.0) / (found.rows[-1].step_seconds or math.nan)
        yield Shown(f"{label} measured", f"{label} over DeAR, GPT of 3.3 M, 2 workers, 500mbit", gain)


def judge(found: Mapping[str, float]) -> tuple[Word, str]:
    best, there = found["best bucket 10gbit"], found["DDP, best bucket measured"]
    fixed, named = max((found[f"{label} 10gbit"], label) for label in RIVALS if "no fusion" not in label)
    said = (
        f"at 10 Gb/s a step is at most {best:.2f} times as fast as with the best bucket size, {fixed:.2f} times "
        f"as with {named} and {found['WFBP, no fusion 10gbit']:.1f} times as WFBP without fusion. At 100 Gb/s it "
        f"is {found['best bucket 100gbit']:.2f} times as fast as with the best bucket size. Measured, it is "
        f"{there:.2f} times"
    )
    if min(best, fixed) >= 1.66 and there > 1:
        return "holds", said
    if fixed >= 1.66 and there > 1:
        return "holds where", f"rivals do not tune their buckets: {said}"
    return "does not hold:", f"{said}. By bandwidth alone at most {found['bound']:.2f} times is possible"


PAPER = Paper(
    system="DeAR",
    title="DeAR: Accelerating Distributed Deep Learning with Fine-Grained All-Reduce Pipelining",
    authors="L. Zhang, S. Shi, X. Chu, W. Wang, B. Li, C. Liu (ICDCS 2023)",
    link="https://arxiv.org/abs/2302.12445",
    claim="up to 83 % faster than the state of the art at 10 Gb/s, up to 15 % at 100 Gb/s",
    setting="five CNNs and BERTs on 64 GPUs (RTX 2080 Ti), 10 Gb/s Ethernet and 100 Gb/s InfiniBand",
    page="methods/exact.md#dear",
    main={
        "bound": "most that bandwidth alone allows",
        "WFBP, no fusion 10gbit": "times as fast as WFBP without fusion, 64 GPUs, 10 Gb/s, most of four models",
        "MG-WFBP 10gbit": "times as fast as MG-WFBP, the same",
        "DDP, 25 MB 10gbit": "times as fast as DDP's 25 MB, the same",
        "best bucket 10gbit": "times as fast as the best bucket size, the same",
        "MG-WFBP 100gbit": "times as fast as MG-WFBP at 100 Gb/s",
        "best bucket 100gbit": "times as fast as the best bucket size at 100 Gb/s",
        "DDP, best bucket measured": "times as fast as DDP's best bucket, GPT, 2 workers, 500 Mb/s",
    },
)
