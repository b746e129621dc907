"""The loss curves of the families of methods: ``python docs/loss_curves.py`` draws ``docs/images/curves/*.svg``.

They were recorded by ``make -C benchmarks/peers`` and ``thinwire reproduce omgs``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from thinwire.tools.pictures.colours import Colours

FOLDER = Path(__file__).parent / "images" / "curves"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
LOCAL = "local sync_every=8 codec=int8"
FAMILIES = {  # page -> size of the model, and its lines
    "exact": ("1.1M", ("ddp", "ssgd")),
    "few_bits": ("1.1M", ("ddp", "cast dtype=int8", "cast dtype=int4")),
    "low_rank": ("3.3M-long", ("ddp", "powersgd rank=4", "acp rank=16")),
    "local": ("1.1M", ("ddp", "local", LOCAL, f"{LOCAL} fragment_sync_delay=3")),
}
DASHES = ("-", "-", "--", ":")
Line = tuple[str, list[float], list[float]]
"""Name, x, y."""


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def of_peers(size: str, labels: tuple[str, ...]) -> tuple[str, str, list[Line]]:
    """What is drawn, the x axis, and the lines: the training loss over seconds at 100 Mb/s on two workers."""
    (run,) = (
        one
        for one in read("peers")["runs"]
        if (one["size"], one["link"], one["group"]) == (size, "100mbit", "gradients")
    )
    rows = {row["label"]: row["curve"] for row in run["rows"]}
    lines = [
        (
            label,
            [point[1] for point in rows[label]],
            [point[2] for point in rows[label]],
        )
        for label in labels
    ]
    what = f"GPT of {run['parameters'] / 1e6:.1f} million parameters, {run['workers']} workers, 100 Mb/s"
    return f"training loss, {what}", "seconds", lines


def of_omgs() -> tuple[str, str, list[Line]]:
    """The same for sparse methods: the held-out loss over steps."""
    (picture,) = read("claims")["omgs"]["pictures"]
    lines = [(one["name"], one["x"], one["y"]) for one in picture["panels"][0]["lines"]]
    return f"held-out loss, {picture['title']}", "steps", lines


def drawings() -> dict[str, tuple[str, str, list[Line]]]:
    """Of each family."""
    found = {name: of_peers(*told) for name, told in FAMILIES.items()}
    return found | {"sparse": of_omgs()}


def draw(path: Path, title: str, x: str, lines: list[Line]) -> None:
    """One file."""
    figure, axes = plt.subplots(figsize=(7.5, 3.6))
    colours = Colours([[name for name, _, _ in lines]])
    for (name, across, up), dashes in zip(lines, DASHES):
        axes.plot(across, up, dashes, color=colours.of(name), label=name, linewidth=1.8)
    axes.set_title(title, loc="left", size=10)
    axes.set_xlabel(x)
    axes.grid(alpha=0.25)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "thinwire"})
    for name, drawn in drawings().items():
        draw(FOLDER / f"{name}.svg", *drawn)
    print(f"written: {FOLDER}")
