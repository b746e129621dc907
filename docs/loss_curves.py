"""The loss curves of the families of methods: ``python docs/loss_curves.py`` draws ``docs/images/curves/*.svg``.

They were recorded by ``make -C benchmarks/peers`` and ``thinwire reproduce omgs``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from thinwire.tools.pictures import Panel, Picture, Series, write_picture

FOLDER = Path(__file__).parent / "images" / "curves"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
LOCAL = "local sync_every=8 codec=int8"
FAMILIES = {  # page -> size of the model, and its lines
    "exact": ("1.1M", ("ddp", "ssgd")),
    "few_bits": ("1.1M", ("ddp", "cast dtype=int8", "cast dtype=int4")),
    "low_rank": ("3.3M-long", ("ddp", "powersgd rank=4", "acp rank=16")),
    "local": ("1.1M", ("ddp", "local", LOCAL, f"{LOCAL} fragment_sync_delay=3")),
}


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def of_peers(size: str, labels: tuple[str, ...]) -> Picture:
    """The training loss over seconds at 100 Mb/s on two workers."""
    (run,) = (
        one
        for one in read("peers")["runs"]
        if (one["size"], one["link"], one["group"]) == (size, "100mbit", "gradients")
    )
    rows = {row["label"]: row["curve"] for row in run["rows"]}
    lines = tuple(
        Series(label, *zip(*((seconds, loss) for _, seconds, loss in rows[label])))
        for label in labels
    )
    what = f"GPT of {run['parameters'] / 1e6:.1f} million parameters, {run['workers']} workers, 100 Mb/s"
    return Picture(what, (Panel("seconds", "training loss", lines),))


def of_omgs() -> Picture:
    """The same for sparse methods: the held-out loss over steps."""
    (picture,) = read("claims")["omgs"]["pictures"]
    lines = tuple(
        Series(one["name"], tuple(one["x"]), tuple(one["y"]))
        for one in picture["panels"][0]["lines"]
    )
    return Picture(picture["title"], (Panel("steps", "held-out loss", lines),))


def drawings() -> dict[str, Picture]:
    """Of each family."""
    return {name: of_peers(*told) for name, told in FAMILIES.items()} | {
        "sparse": of_omgs()
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, drawn in drawings().items():
        write_picture(drawn, FOLDER / f"{name}.svg")
    print(f"written: {FOLDER}")
