"""DeAR: the all-reduce in two halves, one behind backward, one behind the next forward."""

from __future__ import annotations

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


def bandwidth_bound(exchange: float, forward: float = 1.0, backward: float = 2.0) -> float:
    """Return what decoupling gains by bandwidth alone, over an exchange that starts with backward and has no start-ups."""
    half = exchange / 2
    return (forward + max(backward, exchange)) / (max(forward, half) + max(backward, half))


def tuned(seconds: Mapping[float, float]) -> tuple[float, int]:
    """Return the seconds of the limit that the tuner keeps, and how many steps it tries."""
    tuner, trials = FusionTuner([*seconds], FIXED), 0
    while not tuner.done:
        tuner.tell(limit := tuner.ask(), seconds[limit])
        trials += 1
    return seconds[tuner.best()], trials


def simulated() -> Iterator[Shown]:
    yield Shown("bound", "most by bandwidth alone, backward twice as long as forward",
                max(bandwidth_bound(c / 8) for c in range(1, 80)))  # fmt: skip
    limits = [FIXED, *grid(FIXED)]
    ours = [f"dear:fusion={limit}" for limit in limits]
    for link, (published, latency) in LINKS.items():
        most, gains, trials = dict[str, float](), list[float](), list[int]()
        for model, batch in BATCH.items():
            rows = ",".join(dict.fromkeys([*RIVALS.values(), *BUCKETS, *ours]))
            steps = predicted(model, rows, workers=64, ranks_per_node=4, link=link, latency=latency, batch=batch,
                              device="t4", flops=FLOPS)  # fmt: skip
            seconds = {label: step.step_seconds for label, step in steps.items()}
            chosen, tried = tuned({limit: seconds[row] for limit, row in zip(limits, ours)})
            gains.append(seconds[ours[0]] / chosen)
            trials.append(tried)
            rivals = {label: seconds[row] for label, row in RIVALS.items()}
            rivals["the best bucket"] = min(seconds[row] for row in BUCKETS)
            for label, rival in rivals.items():
                most[label] = max(most.get(label, 0.0), rival / chosen)
        for label, value in most.items():
            yield Shown(f"{label} {link}", f"{label} over DeAR, tuned, the most of four models, 16 x 4 GPUs, {link}", value,
                        published="" if label == "the best bucket" else published)  # fmt: skip
        yield Shown(
            f"tuner {link}", f"DeAR's 25 MB over its tuner's choice, the most of four models, {link}", max(gains)
        )
        yield Shown(f"trials {link}", f"steps that the tuner tries, the most of four models, {link}", max(trials), "")


def measured(bench: Workbench) -> Iterator[Shown]:
    rows = ",".join([*ROWS.values(), "dear:fusion=25", "dear", "dear:fusion=tune"])
    found = bench.bench(MODEL, rows, link="500mbit", steps=8 if bench.full else 6, rounds=6 if bench.full else 3)
    ours = found.row("dear").step_seconds or 0.0
    for label, row in ROWS.items():
        step = found.row(row.replace(":", " ")).step_seconds or 0.0
        yield Shown(
            f"{label} measured", f"{label} over DeAR, GPT of 3.3 M, 2 workers, 500mbit", step / ours, how="measured"
        )
    fixed, best = ((found.row(f"dear fusion={rule}").step_seconds or 0.0) for rule in ("25", "tune"))
    yield Shown("tuner measured", "DeAR's 25 MB over its tuner's choice, the same", fixed / best, how="measured")


def judge(found: Mapping[str, float]) -> tuple[Word, str]:
    best, there = found["the best bucket 10gbit"], found["DDP, best bucket measured"]
    named = max(("DDP, 25 MB", "Horovod, 64 MB", "MG-WFBP"), key=lambda label: found[f"{label} 10gbit"])
    said = (f"at 10 Gb/s at most {best:.2f} times the best bucket, {found[f'{named} 10gbit']:.2f} times {named}, "
            f"{found['WFBP, no fusion 10gbit']:.1f} times WFBP without fusion; measured {there:.2f} times the best bucket")  # fmt: skip
    if best >= 1.66 and there > 1:
        return "holds", said
    if found[f"{named} 10gbit"] >= 1.66 and there > 1:
        return "holds where", f"buckets are not tuned: {said}"
    return (
        "does not hold:",
        f"{said}. Bandwidth alone allows {found['bound']:.2f}, where an exchange takes four forwards",
    )


PAPER = Paper(
    name="dear",
    system="DeAR",
    title="DeAR: Accelerating Distributed Deep Learning with Fine-Grained All-Reduce Pipelining",
    authors="L. Zhang, S. Shi, X. Chu, W. Wang, B. Li, C. Liu (ICDCS 2023)",
    link="https://arxiv.org/abs/2302.12445",
    claim="up to 83 % faster than the state of the art at 10 Gb/s, up to 15 % at 100 Gb/s",
    setting="five CNNs and BERTs on 64 GPUs (RTX 2080 Ti), 10 Gb/s Ethernet and 100 Gb/s InfiniBand",
    page="methods/dear.md",
    simulated=simulated,
    measured=measured,
    judge=judge,
)
