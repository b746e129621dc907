"""ACP-SGD: alternate compressed power iteration."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

from thinwire.systems.papers.paper import Paper, Shown, Word
from thinwire.systems.papers.workbench import Workbench, predicted

CASES = {"resnet50": (64, 4), "resnet152": (32, 4), "bert-base": (32, 32), "bert-large": (8, 32)}
"""Model -> samples a GPU, and rank, as in the authors' script (lzhangbv/acpsgd, batch.sh)."""
FLOPS = 7e12
"""What a 2080 Ti sustains in training: assumed, half of its fp32 peak."""
PUBLISHED = {"10gbit": ("4.06", "1.43")}
LINKS = ("1gbit", "10gbit", "100gbit")
MODEL = "chargpt:layers=4:width=256:heads=4:batch=4"
GPT, LOSS = "chargpt:layers=2:width=128:heads=4:block=32", 2.6


def simulated() -> Iterator[Shown]:
    for link in LINKS:
        over: tuple[list[float], list[float]] = [], []
        for model, (batch, rank) in CASES.items():
            ours, powersgd = f"acp:rank={rank}", f"powersgd:rank={rank}:fusion=single"
            steps = predicted(model, f"ssgd,{ours},{powersgd}", workers=32, ranks_per_node=4, link=link,
                              batch_size=batch, device="t4", device_flops=FLOPS)  # fmt: skip
            for ratios, other in zip(over, ("ssgd", powersgd)):
                ratios.append(steps[other].step_seconds / steps[ours].step_seconds)
        for ratios, other, said in zip(over, ("S-SGD", "Power-SGD in one bucket"), PUBLISHED.get(link, ("", ""))):
            key = f"{other.partition(' ')[0]} {link}"
            what = f"{other} over ACP-SGD, mean of four models, 8 x 4 GPUs, {link}"
            yield Shown(key, what, statistics.fmean(ratios), published=said)


def measured(bench: Workbench) -> Iterator[Shown]:
    """A GPT at the paper's rank: its step on a thin link, and its steps to a loss; then a CNN with SGD to its end."""
    found = bench.bench(MODEL, "ssgd,powersgd:rank=32:fusion=single,acp:rank=32", link="100mbit")
    ours = found.row("acp").step_seconds or 0.0
    for other, label in (("S-SGD", "ssgd"), ("Power-SGD in one bucket", "powersgd")):
        ratio = (found.row(label).step_seconds or 0.0) / ours
        what = f"{other} over ACP-SGD, rank 32, GPT of 3.3 M, 2 workers, 100mbit"
        yield Shown(f"{other.partition(' ')[0]} measured", what, ratio)
    sooner = bench.sooner(GPT, "ssgd,acp:rank=32", LOSS, link="50mbit")["ssgd"]
    what = f"S-SGD over ACP-SGD, rank 32, seconds to a held-out loss of {LOSS}, GPT of 0.4 M, 2 workers, 50mbit"
    yield Shown("to a loss", what, sooner)
    length = 1000 if bench.full else 300
    runs = bench.train("digits", "ssgd,acp:rank=4", steps=length, every=length // 10)
    loss = {label: row.curve[-1].judged for label, row in runs.items() if row.curve}
    what = f"held-out loss of ACP-SGD, rank 4, over S-SGD's after {length} steps, CNN with SGD, digits"
    yield Shown("loss", what, loss["acp rank=4"] / loss["ssgd"], published="1")


def judge(found: Mapping[str, float]) -> tuple[Word, str]:
    dense, low_rank, loss = found["S-SGD 10gbit"], found["Power-SGD 10gbit"], found["loss"]
    fast = (
        f"a step at 10 Gb/s is {dense:.2f} times as fast as S-SGD's and {low_rank:.2f} times as Power-SGD's (simulated)"
    )
    if dense < 0.8 * 4.06 or low_rank < 1 + 0.8 * 0.43:
        return "does not hold:", fast
    ends = (
        f"a GPT reaches a loss {found['to a loss']:.1f} times as fast, and a CNN ends at {loss:.2f} times S-SGD's loss"
    )
    if found["to a loss"] < 1 or loss > 1.1:
        return "holds where", f"only the step counts: {fast}, but {ends}"
    return "holds", f"{fast}. Measured, {ends}"


PAPER = Paper(
    system="ACP-SGD",
    title="Evaluation and Optimization of Gradient Compression for Distributed Deep Learning",
    authors="L. Zhang, L. Zhang, S. Shi, X. Chu, B. Li (ICDCS 2023)",
    link="https://arxiv.org/abs/2306.08881",
    claim="4.06 times as fast as S-SGD and 1.43 times as Power-SGD, at similar accuracy",
    setting="ResNet-50 and -152, BERT-Base and -Large on 32 GPUs (RTX 2080 Ti), 10 Gb/s Ethernet",
    page="methods/low_rank.md#acp",
    needs={"digits": ("sklearn",)},
    main={
        "S-SGD 10gbit": "times as fast as S-SGD, mean of four models, 32 GPUs, 10 Gb/s",
        "Power-SGD 10gbit": "times as fast as Power-SGD, the same",
        "S-SGD 1gbit": "times as fast as S-SGD at 1 Gb/s",
        "S-SGD 100gbit": "times as fast as S-SGD at 100 Gb/s",
        "S-SGD measured": "times as fast as S-SGD, GPT, 2 workers, 100 Mb/s",
        "to a loss": "times as fast as S-SGD, seconds to a loss, GPT, 50 Mb/s",
        "loss": "last loss beside S-SGD's; less is better",
    },
)
