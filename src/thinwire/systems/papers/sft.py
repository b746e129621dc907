"""SFT: split fine-tuning through a thin cut, from weights that are really pre-trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from statistics import fmean

from thinwire.systems.papers.paper import Paper, Shown, Word
from thinwire.systems.papers.sst2_like_data import encoder, reviews
from thinwire.systems.papers.workbench import Workbench
from thinwire.systems.split import Link, Recipe, Shape, SplitPlan, crossings, estimate, split_finetune
from thinwire.systems.split.estimate import shape_of, steps_of
from thinwire.systems.split.finetune import train_unsplit
from thinwire.systems.split.models import pretrained, view_of
from thinwire.systems.split.tasks import glue_task, local_tokenizer

CUT, LINK, SMALL = 3, Link(1e8, 1e8), ("int4", "pack")
PLANS = {
    "as published": SplitPlan(CUT, rank=4),
    "wide": SplitPlan(CUT, "principal", 128, up=SMALL, down=SMALL),
    "thin": SplitPlan(CUT, "principal", 56, up=SMALL, down=SMALL),
}
"""Of a width of 384: rank 4 is what 8 is of BERT-base's 768."""


def simulated() -> Iterator[Shown]:
    """Bytes, exactly, and seconds on a link, of BERT-base, rank 8, 32 x 128 tokens without padding."""
    shape, batch = Shape(768, 3072, 2), ([128] * 32, 32, 128)
    whole, thin = (estimate(crossings(SplitPlan(6, kind), shape, *batch), LINK) for kind in ("boundary", "lowrank"))
    what = "BERT-base, rank 8, 32 x 128 tokens: the plain split over it"
    yield Shown("traffic", f"{what}, bytes of activations and gradients", whole.state / thin.state, published="96")
    yield Shown("socket", f"{what}, all bytes through the socket", whole.wire / thin.wire)
    yield Shown("link", f"{what}, seconds on a link of 100 Mb/s", whole.link_seconds / thin.link_seconds)


def measured(bench: Workbench) -> Iterator[Shown]:
    """Accuracy of MiniLM on sentences of film reviews: not split, and split in three ways."""
    learn, held_out, epochs, seeds = (2600, 2000, 3, range(3)) if bench.full else (800, 800, 2, range(1))
    folder = encoder(bench.tell)
    task = glue_task("sst2", reviews(learn, held_out, bench.tell), local_tokenizer(folder), 64)
    points, ratios = {name: list[float]() for name in ("not split", *PLANS)}, dict[str, float]()
    for seed in seeds:
        model, recipe = pretrained(folder, 2, seed), Recipe(learning_rate=1e-4, epochs=epochs, seed=seed)
        shape = shape_of(view_of(model), 2)
        plain = steps_of(SplitPlan(CUT, "boundary"), shape, task.train, recipe)
        whole = sum(estimate(step, LINK).state for step in plain)

        def told(step: int, of: int, loss: float, name: str = "not split", seed: int = seed) -> None:
            bench.tell(f"{name}, seed {seed}: step {step} of {of}, loss {loss:.2f}")

        points["not split"].append(100 * train_unsplit(model, task, recipe, told)[0])
        for name, plan in PLANS.items():
            report = split_finetune(plan, model, task, recipe=recipe, on_step=partial(told, name=name))
            points[name].append(100 * (report.score or 0.0))
            ratios[name] = whole / report.training.state
    base = fmean(points["not split"])
    what = f"MiniLM-L6, {learn} film-review sentences, {epochs} epochs, not split: accuracy"
    yield Shown("not split", what, base, "%")
    for name, plan in PLANS.items():
        what = f"{name}: {plan.kind} {plan.rank}{', int4, pack' if plan.up else ''}"
        yield Shown(f"{name} traffic", f"{what}: the plain split's bytes over its own", ratios[name])
        yield Shown(name, f"{what}: points of accuracy lost", base - fmean(points[name]), "points")


def judge(found: Mapping[str, float]) -> tuple[Word, str]:
    lost = {name: found[name] for name in PLANS}
    called = {name: f"{PLANS[name].rank} principal directions" for name in ("wide", "thin")}
    said = "; ".join(
        f"{called.get(name, name)}: {found[f'{name} traffic']:.0f} times less traffic, "
        f"{abs(lost[name]):.1f} points {'less' if lost[name] > 0 else 'more'} accuracy"
        for name in PLANS
    )
    if found["traffic"] > 76 and lost["as published"] <= 1:
        return "holds", said
    if kept := [name for name in ("wide", "thin") if lost[name] <= 1 and found[f"{name} traffic"] >= 24]:
        return "holds where", f"the cut keeps every residual, as with {called[kept[-1]]}; {said}"
    return "does not hold:", f"the traffic shrinks, and the accuracy too; {said}"


PAPER = Paper(
    system="SFT",
    title="An Efficient Split Fine-tuning Framework for Edge and Cloud Collaborative Learning",
    authors="S. Shi, Q. Yang, Y. Xiang, S. Qi, X. Wang (2022)",
    link="https://arxiv.org/abs/2211.16703",
    claim="96 times less traffic between edge and cloud with little impact on the accuracy",
    setting="fine-tuning pre-trained BERT on 9 NLP data sets, rank 8",
    page="split.md",
    needs={"split": ("transformers", "safetensors")},
    main={
        "traffic": "traffic saved, BERT-base, rank 8, activations and gradients",
        "socket": "the same, all bytes",
        "not split": "MiniLM on film reviews, not split: accuracy",
        "as published traffic": "as published: traffic saved",
        "as published": "as published: points of accuracy lost",
        "thin traffic": "56 principal directions, 4 bits: traffic saved",
        "thin": "the same: points of accuracy lost",
    },
)
