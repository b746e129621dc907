"""The maps in "Which method for me": ``python docs/winners.py`` writes ``docs/winners/<model>.md``, in a minute.

Each cell is what ``thinwire plan MODEL --map`` recommends at this rate with so many workers, among all candidates and
among exact ones: how many times sooner than the faster dense form at a loss.
"""

from __future__ import annotations

import sys
from pathlib import Path

from thinwire.predict.choose import map_of
from thinwire.predict.choose.grid import Map
from thinwire.tools.cli.plan_inputs import read_question

FOLDER = Path(__file__).parent / "winners"
MODELS = ("resnet50", "bert-base")
WORKERS = (2, 4, 16, 64)


def winners(model: str) -> Map:
    """With the defaults of ``thinwire plan``."""
    asked = read_question(
        model,
        link=None,
        delay=None,
        costs=None,
        workers=None,
        ranks_per_node=None,
        methods=None,
        batch_size=None,
        device=None,
        flops=None,
        profile=None,
    )
    return map_of(
        asked.candidates,
        asked.profile,
        workers=WORKERS,
        costs=asked.assumed,
        **asked.where,
    )


def rate(bits_per_second: float) -> str:
    """As ``tc`` writes it."""
    return (
        f"{bits_per_second / 1e9:g} Gb/s"
        if bits_per_second >= 1e9
        else f"{bits_per_second / 1e6:g} Mb/s"
    )


def short(label: str) -> str:
    """Without the names of options: "acp 4"."""
    name, _, options = label.partition(":")
    return " ".join(
        [name, *(part.partition("=")[2] for part in options.split(":") if part)]
    )


def table(model: str) -> str:
    """As Markdown."""
    found = winners(model)
    heads = [model, *(f"{count} workers" for count in found.workers)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for bits, row in zip(found.bits_per_second, found.cells):
        cells = [
            f"{short(c.winner)}, {c.dense_seconds / c.loss_seconds:.1f} x" for c in row
        ]
        lines.append(f"| {rate(bits)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or MODELS:
        (FOLDER / f"{name}.md").write_text(table(name), encoding="utf-8")
        print(f"\n{table(name)}", end="", flush=True)
