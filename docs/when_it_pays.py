"""When does a method pay? ``python docs/when_it_pays.py`` writes ``docs/methods/when/<name>.md``, in some ten seconds.

Each figure is S-SGD's predicted step over the method's, as ``thinwire plan MODEL --link LINK --workers N`` has it; for
S-SGD itself its step over compute alone. ``python docs/when_it_pays.py acp cast`` makes only those again.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

from thinwire.core.methods.registry import classes, label_of
from thinwire.predict.choose import resolved
from thinwire.predict.timeline import simulate
from thinwire.tools.cli.plan_inputs import Question, read_methods, read_question

FOLDER = Path(__file__).parent / "methods" / "when"
MODELS = ("resnet50", "bert-base")
LINKS = ("100mbit", "1gbit", "10gbit", "100gbit")
WORKERS = (4, 16, 64)
MACHINES_OF_SEVERAL = {4: 2, 16: 4, 64: 8}  # workers: of each machine
SEVERAL = ("hitopk",)  # the pages of methods that need them

LABELS = {
    **{
        name: tuple(label_of(name, options) for options in cls.candidates)
        for name, cls in classes().items()
    },
    "cast": ("cast:dtype=bf16", "cast:dtype=int8"),
    "qsgd": ("qsgd:bits=4",),
    "dgc": ("dgc:density=0.001",),
    "hitopk": ("hitopk:density=0.01", "ssgd:collective=torus"),
    "omgs": ("omgs:density=0.01",),
    "lags": ("lags:max_ratio=1000",),
    "local": ("local", "local:codec=int2"),
}
"""Of each page: what its tables are of."""


@cache
def question(model: str, link: str, workers: int, per_node: int) -> Question:
    """What ``thinwire plan`` makes of these words, its defaults for the rest."""
    return read_question(
        model,
        link=link,
        delay=None,
        costs=None,
        workers=workers,
        ranks_per_node=per_node,
        methods="ssgd",
        batch_size=None,
        device=None,
        flops=None,
        profile=None,
    )


@cache
def step_seconds(
    label: str, model: str, link: str, workers: int, per_node: int
) -> float:
    asked, chosen = (
        question(model, link, workers, per_node),
        dict(read_methods(label)[0])[label],
    )
    chosen = resolved(
        chosen, asked.profile, asked.topology, asked.costs(), **asked.where
    )
    return simulate(
        chosen, asked.profile, asked.topology, asked.costs(), **asked.where
    ).step_seconds


def cell(page: str, label: str, model: str, link: str, workers: int) -> str:
    """One figure of a page."""
    per_node = MACHINES_OF_SEVERAL[workers] if page in SEVERAL else 1
    plain = step_seconds("ssgd", model, link, workers, per_node)
    if page == "ssgd":
        profile = question(model, link, workers, per_node).profile
        return figure(plain / (profile.forward_seconds + sum(profile.backward_seconds)))
    return figure(plain / step_seconds(label, model, link, workers, per_node))


def figure(ratio: float) -> str:
    """Three digits."""
    return (
        f"{ratio:.2f}"
        if ratio < 9.995
        else f"{ratio:.1f}"
        if ratio < 99.95
        else f"{ratio:.0f}"
    )


def table(page: str, label: str) -> str:
    """One table as Markdown."""
    heads = [
        f"{m}, {w} workers" if w == WORKERS[0] else f"{w}"
        for m in MODELS
        for w in WORKERS
    ]
    lines = [f"| `{label}` | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for link in LINKS:
        cells = [cell(page, label, m, link, w) for m in MODELS for w in WORKERS]
        lines.append(f"| {link} | {' | '.join(cells)} |")
    return "\n".join(lines)


def fragment(page: str) -> str:
    """What a page includes."""
    return "\n\n".join(table(page, label) for label in LABELS[page]) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    if unknown := set(sys.argv[1:]) - set(LABELS):
        sys.exit(
            f"unknown method {', '.join(sorted(unknown))}: give names of pages, or none for all"
        )
    for name in sys.argv[1:] or LABELS:
        (FOLDER / f"{name}.md").write_text(fragment(name), encoding="utf-8")
        print(f"\n{fragment(name)}", end="", flush=True)
