"""The page "What local steps cost": ``python docs/long_runs.py`` writes it from ``benchmarks/results/race.json``.

``python benchmarks/race.py --whole 1504`` measures that file's whole runs anew.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

from thinwire.core.methods.powersgd import PowerSGD
from thinwire.tools.bench.models.registry import build_model
from thinwire.tools.bench.rows import parse_rows
from thinwire.tools.pictures import Level, Panel, Picture, Series, write_picture

DOCS = Path(__file__).parent
PAGE = DOCS / "long_runs.md"
PICTURE = "images/long_runs.png"
RESULTS = DOCS.parent / "benchmarks" / "results" / "race.json"
RATE = 0.0028
BITS = {"int8": 8.125, "int4": 4.125, "int2": 2.125, "int1": 1.125}
"""Of an element, its share of a block's scale of 32 bits included."""
VARIANTS = {  # of benchmarks/local_variants.py; name, and bytes over those of DDP
    "local_variants:second_moments": (
        "local, every 4 in 2 bits, second moments every 12",
        BITS["int2"] / 32 / 4 + 1 / 12,
    ),
    "local_variants:growing": (
        "local, every 4 to 16 in 2 bits, growing",
        BITS["int2"] / 32 / 5.5,
    ),
}

HEAD = """# What local steps cost

What is the loss at the end of a whole run, and what was sent for it? Each row below trained a character GPT on the
standard library's text with AdamW, from weights as GPT-2 begins with (what is added to a residual starts
small), over a schedule that rises in the first 100 steps and falls to a tenth along a
cosine, at the learning rate that serves this row best. *Sent* is a share of what DDP sends. *Way* is how far the row
comes from one worker alone (0) to DDP (1): the two ends that everybody has. *Steps* is how many steps the row needs for
one of DDP's, by its final loss and a power law through DDP's own runs of 0.5, 0.63, 0.8 and 1 times the length.
"""
TAIL = """
Again, with other models or your own: [`thinwire race MODEL --link 100mbit --steps 2000`](race.md#whole-runs). Here:
`python benchmarks/race.py --whole 1504`, then `python docs/long_runs.py`.
"""


def whole() -> list[dict[str, Any]]:
    """The whole runs of the file, the usual ones first."""
    return sorted(
        (
            one
            for one in json.loads(RESULTS.read_text(encoding="utf-8"))
            if one["track"]["schedule"]
        ),
        key=lambda one: list(HEADINGS).index(kind(one)),
    )


def kind(one: dict[str, Any]) -> str:
    """What is special about some runs; "": nothing."""
    model, workers, steps = (one["track"][key] for key in ("model", "workers", "steps"))
    if "muon" in model:
        return "muon"
    if "scaled_init" not in model:
        return "plain"
    if one["elements"] > 2e6:
        return "larger"
    return "workers" if workers > 2 else "short" if steps < 1000 else ""


def sent(methods: str, model: str = "") -> float:
    """Bytes of a row over those of DDP."""
    if methods in VARIANTS:
        return VARIANTS[methods][1]
    (row,) = parse_rows(methods)
    if "powersgd" in row.kind:
        shapes = [tuple(p.shape) for p in build_model(model).model.parameters()]
        factors = PowerSGD(rank=int(row.options["rank"])).payload(shapes, 0)
        return sum(factors) / sum(map(math.prod, shapes))
    if row.kind == "alone":
        return 0.0
    if row.kind == "accumulate":
        return 1 / int(row.options["every"])
    if row.kind != "local":
        return BITS.get(str(row.options.get("dtype")), 32) / 32
    return BITS.get(str(row.options["codec"]), 32) / 32 / int(row.options["sync_every"])


def named(methods: str) -> str:
    """A row in words."""
    if methods in VARIANTS:
        return VARIANTS[methods][0]
    (row,) = parse_rows(methods)
    look = f", look {row.options['look']}" if "look" in row.options else ""
    if row.kind == "local":
        late = row.options.get("fragment_sync_delay")
        bits = str(row.options["codec"]).removeprefix("int")
        said = f"local, every {row.options['sync_every']}"
        said += (
            ", exactly" if bits == "none" else f" in {bits} bit{'s' * (bits != '1')}"
        )
        return said + (f", merged {late} late" if late else "") + look
    bits = str(row.options.get("dtype")).removeprefix("int")
    names = {
        "ddp": "DDP",
        "ssgd": "DDP",
        "alone": "one worker alone",
        "torch-powersgd": "DDP, torch's PowerSGD hook, rank 4",
        "powersgd": "powersgd, rank 4",
        "cast": f"gradients in {bits} bits",
    }
    if row.kind == "accumulate":
        return f"DDP that accumulates {row.options['every']} steps"
    return names.get(row.kind, methods) + look


def finals(one: dict[str, Any], label: str) -> float:
    return statistics.median(one["rows"][label]["finals"])


HEADINGS = {
    "": "",
    "larger": "## A model three times as large",
    "short": "## A run of a quarter of that length",
    "workers": "## Four workers",
    "muon": "## Muon for the matrices",
    "plain": "## If residual layers do not begin small",
}


def table(one: dict[str, Any]) -> list[str]:
    """The rows of one model, the lowest loss first."""
    seeds = max(len(row["finals"]) for row in one["rows"].values())
    lines = [
        f"{one['elements'] / 1e6:.1f} million parameters, {one['track']['workers']} workers, "
        f"{one['track']['steps']:,} steps; "
        + (
            "one seed"
            if seeds == 1
            else f"the median of {seeds} seeds where ends are shown, else one"
        )
        + ":",
        "",
        "| row | sent | rate | final loss | way | steps |",
        "|---|---|---|---|---|---|",
    ]
    alone, ddp = (
        finals(one, name) if name in one["rows"] else None for name in ("alone", "ddp")
    )
    for label in sorted(one["rows"], key=lambda label: finals(one, label)):
        row = one["rows"][label]
        share, loss = sent(row["methods"], one["track"]["model"]), finals(one, label)
        way = f"{(alone - loss) / (alone - ddp):.2f}" if alone and ddp else ""
        factors = sorted(x for x in row["factors"] if x is not None)
        steps = f"{statistics.median(factors):.2f}"
        if len(factors) > 1 and label != "ddp":
            steps += f" ({factors[0]:.2f} to {factors[-1]:.2f})"
        bytes_ = "nothing" if not share else "1" if share == 1 else f"1/{1 / share:.0f}"
        lines.append(
            f"| {named(row['methods'])} | {bytes_} | {RATE * row['rate']:.1e} | {loss:.3f} | {way} | {steps} |"
        )
    return lines


def picture(one: dict[str, Any]) -> Picture:
    """Final loss against megabytes a step; DDP and one worker alone as lines."""
    exact, workers = 8e-6 * one["elements"], one["track"]["workers"]
    exact *= (workers - 1) / workers
    levels, families = [], dict[str, list[tuple[float, float, str]]]()
    for label, row in one["rows"].items():
        name, loss = named(row["methods"]), finals(one, label)
        if label in ("ddp", "alone"):
            levels.append(Level(loss, name))
            continue
        family, every = name, ""
        if found := re.fullmatch(
            r"local, every (\d+)(.*?)( merged \d+ late)?(, look.*)?", name
        ):
            every, late = found[1], ", merged late" if found[3] else ""
            family = f"local{found[2].rstrip(',')}{late}{found[4] or ''}"
        at = sent(row["methods"], one["track"]["model"]) * exact
        families.setdefault(family, []).append((at, loss, every))
    series = []
    for family, points in families.items():
        x, y, every = zip(*sorted(points, reverse=True))
        said = f"{family}, every {', '.join(every)}" if every[0] else family
        series.append(Series(said, x, y, "line" if len(x) > 1 else "points"))
    title = f"GPT of {one['elements'] / 1e6:.1f} million parameters, {workers} workers, {one['track']['steps']:,} steps"
    panel = Panel(
        "MB sent per step",
        "final held-out loss",
        tuple(series),
        levels=tuple(levels),
        log_x=True,
    )
    return Picture(title, (panel,))


def page(found: list[dict[str, Any]]) -> str:
    """The whole page as Markdown."""
    lines = [HEAD, f"![Final loss against megabytes per step]({PICTURE})", ""]
    for one in found:
        name = kind(one)
        lines += [HEADINGS[name], ""] if name else []
        lines += [*table(one), "", READINGS.get(name, "")]
    return "\n".join([*lines, TAIL])


READINGS = {
    "": """\
* **Every 4 steps in 2 bits, at 1/60 of DDP's bytes, costs 2 % more steps, in 1 bit 6 %.** One worker alone needs
  87 % more, and DDP that accumulates 4 steps, at fifteen times those bytes, 56 %. These two are what everybody has, so
  a method has to beat them.
* **Bits cost little, periods more, lateness most.** Every 8 steps costs 7 %, every 16 29 %; merged 1 step late, every 4
  costs 5 % and every 8 11 %, and merged 3 late, every 8 costs as much as every 16 that is waited for. So `"local"`
  first takes fewer bits, then longer periods, and lets rounds travel beside training only where waiting costs more.
* **A [look-ahead](methods/local.md#looking-ahead) sends nothing and gives all of that back**: every 4 steps in 1 bit,
  and even every 8, end below DDP. DDP with the same look ends lower still, so compare like with like: every 4 then
  needs about 1 % more steps than DDP.
* **With the time of a step** on two machines at 100 Mb/s, every 8 in 1 bit with a look takes 1.05 times as long to
  DDP's loss as DDP's own steps would without a network; the best of other libraries, torchft's LocalSGD every 32
  steps, 1.84, and one worker alone 1.87 ([tolls](peers.md#what-the-network-still-costs)).
* **What else was tried, and is out**: averaging AdamW's second moments every 12 steps (3 %, and five times the bytes),
  and periods that grow from 4 to 16 as the rate falls (5 %, at three quarters of the bytes of every 4).
* **Each row wants its own rate.** Local steps want about the root of the number of workers times DDP's.
* The same run of DDP differs by a hundredth between two libraries of matrix products, and so do seeds.
""",
    "larger": """\
The order is that above: every 4 steps in 2 bits costs 5 % more steps, and **in 1 bit with a look-ahead it ends below
DDP**.
""",
    "short": """\
In a shorter run, whose loss still falls steeply at its end, periods cost less than in the long one (every 16 in 2 bits
13 %, not 29 %), and **the look-ahead loses**: it is for long runs. Accumulating is worse than one worker alone, because
it makes only a quarter of the optimizer's steps. `plan` goes by the long runs.
""",
    "workers": """\
With four workers the two ends are further apart, since one worker alone sees a quarter of the data, and local steps
with a look-ahead go nine tenths of the way.
""",
    "muon": """\
torch's Muon trains the matrices of the blocks, AdamW embeddings and head ([how](script.md#several-optimizers-muon)).
After the same steps DDP ends at 1.453, where AdamW ends at 1.679, for which AdamW would need 2.4 times the steps; no
method on this page gains as much. A step takes 1.3 times as long at 512 tokens, and no longer at 4,096. **Every 4 steps
in 2 bits then ends where DDP with Muon does**, without a look-ahead, at 1/60 of its bytes.
""",
    "plain": """\
Here what is added to a residual begins as large as everything else. Rates cannot be as high as local steps
and accumulation want them: DDP ends lower than above, those do not; and a look-ahead wants half the rate that is best
without it.
""",
}

if __name__ == "__main__":
    measured = whole()
    PAGE.write_text(page(measured), encoding="utf-8")
    write_picture(picture(measured[0]), DOCS / PICTURE)
    print(f"written: {PAGE}")
