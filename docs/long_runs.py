"""The page "Local steps: what they cost": ``python docs/long_runs.py`` writes it from ``benchmarks/results/race.json``.

``python benchmarks/race.py`` measures that file's whole runs anew.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

from thinwire.core.methods.acp import ACP
from thinwire.core.methods.powersgd import PowerSGD
from thinwire.tools.bench.models.registry import build_model
from thinwire.tools.bench.rows import parse_rows
from thinwire.tools.pictures import Level, Panel, Picture, Series, write_picture

DOCS = Path(__file__).parent
PAGE = DOCS / "long_runs.md"
PICTURE = "images/long_runs.png"
RESULTS = DOCS.parent / "benchmarks" / "results" / "race.json"
BITS = {"int8": 8.125, "int4": 4.125, "int2": 2.125, "int1": 1.125}
"""Of an element, its share of a block's scale of 32 bits included."""
TRIED = "local_variants:"
"""Rows of benchmarks/local_variants.py, which gained nothing: they stay in the record."""

HEAD = """# Local steps: what they cost

This page is for those who wonder how much longer training with local steps takes. The answer is the **steps factor**:
how many steps a method needs for one of DDP's, to the same loss. 1.06 means 6 % more steps than DDP. Times the seconds
of a step, it gives the time to a loss, by which `plan`, `race` and `"auto"` rank methods.

Each row below trained a small GPT on text with AdamW, over a whole run whose learning rate rises and then falls along a
cosine, at the rate that serves this row best. *Sent* is a share of what DDP sends. *Steps* is the steps factor of the
final loss, by DDP's own runs of several lengths.
"""
TAIL = """
With your own model: [`thinwire race MODEL --link 100mbit --steps 2000`](race.md#how-it-is-measured). In a checkout:
`python benchmarks/race.py`, then `python docs/long_runs.py`.
"""


def whole() -> list[dict[str, Any]]:
    """The whole runs of the file, the usual ones first."""
    runs = [
        one
        for one in json.loads(RESULTS.read_text(encoding="utf-8"))
        if one["track"]["schedule"]
    ]
    for one in runs:
        kept = {k: v for k, v in one["rows"].items() if not k.startswith(TRIED)}
        one["rows"] = kept
    return sorted(runs, key=lambda one: list(HEADINGS).index(kind(one)))


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
    (row,) = parse_rows(methods)
    if "powersgd" in row.kind or row.kind == "acp":
        shapes = [tuple(p.shape) for p in build_model(model).model.parameters()]
        low_rank = (ACP if row.kind == "acp" else PowerSGD)(
            rank=int(row.options["rank"])
        )
        factors = [sum(low_rank.payload(shapes, phase)) for phase in range(2)]
        return sum(factors) / 2 / sum(map(math.prod, shapes))
    if row.kind == "alone":
        return 0.0
    if row.kind == "accumulate":
        return 1 / int(row.options["every"])
    if row.kind != "local":
        return BITS.get(str(row.options.get("dtype")), 32) / 32
    return BITS.get(str(row.options["codec"]), 32) / 32 / int(row.options["sync_every"])


def named(methods: str) -> str:
    """A row in words."""
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
        "acp": "acp, rank 32",
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
        "| row | sent | final loss | steps |",
        "|---|---|---|---|",
    ]
    for label in sorted(one["rows"], key=lambda label: finals(one, label)):
        row = one["rows"][label]
        if kind(one) and "delay" in label:  # the first table is enough for these
            continue
        share, loss = sent(row["methods"], one["track"]["model"]), finals(one, label)
        factors = sorted(x for x in row["factors"] if x is not None)
        steps = f"{statistics.median(factors):.2f}"
        if len(factors) > 1 and label != "ddp":
            steps += f" ({factors[0]:.2f} to {factors[-1]:.2f})"
        bytes_ = "nothing" if not share else "1" if share == 1 else f"1/{1 / share:.0f}"
        lines.append(f"| {named(row['methods'])} | {bytes_} | {loss:.3f} | {steps} |")
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
            r"local, every (\d+)(.*?)(?: merged (\d+) late)?(, look.*)?", name
        ):
            every = found[1]
            late = {None: "", "1": ", merged 1 late"}.get(found[3], ", merged late")
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
*Every 4 in 2 bits*: workers average after every 4 steps, and send each number in 2 bits. *Merged 1 late*: training goes
on meanwhile, and the average is used a step later. *Look 0.5* is the [look-ahead](methods/local.md).

* **Every 4 steps in 2 bits costs 2 % more steps, at 1/60 of DDP's bytes.** The two ways that need no method cost more:
  one worker alone needs 87 % more steps, and DDP that accumulates 4 steps 56 % more.
* **Fewer bits cost little, longer periods more, late averages most.** So `"local"` takes few bits first, then longer
  periods, and merges late only where waiting costs more.
* **A look-ahead sends nothing and regains what local steps lose.** It helps DDP as well: DDP with the same look-ahead
  is first in the table.
* **Gradients in 4 bits cost nothing** with two workers, at 1/8 of the bytes. Low rank does: `acp` at rank 32 22 % more
  steps, `powersgd` at rank 4 52 %.
* **Local steps want a higher learning rate**: about DDP's times the square root of the number of workers.

The time of a step on a network is in [Compared with other libraries](peers.md).
""",
    "larger": """\
The order is the same: every 4 or 8 steps in 2 bits costs 5 % more steps. In 1 bit with a look-ahead one seed needed 2 %
fewer, the other 6 % more. Longer periods cost less than with the smaller model (every 16 steps 19 % more, not 29 %),
and so do averages that are merged late (every 8 steps, 3 late: 21 % more, not 31 %). Each row is the best of two to six
learning rates.
""",
    "short": """\
In a shorter run long periods cost less (every 16 steps in 2 bits 13 % more, not 29 %), and the look-ahead does not
help.
""",
    "workers": """\
One worker alone sees a quarter of the data, so averages are worth more, and late or rare ones cost more. **With four
workers take more bits and a [look-ahead](methods/local.md)**: every 4 steps in 4 bits with a look-ahead, or every 2 in
2 bits, costs 3 to 4 % more steps at 1/30 of DDP's bytes. Without a look-ahead every 4 steps cost 16 to 23 % more.
Gradients in 8 bits cost 2 %, in 4 bits 11 %, `acp` at rank 32 31 %, PowerSGD 70 %. From three workers on, `plan` and
`"local"` go by these rows. Learning rates are one to three times DDP's.
""",
    "muon": """\
torch's Muon trains the matrices of the blocks, and AdamW the rest ([how](script.md#several-optimizers-muon)). AdamW
would need 2.4 times the steps to the same loss; no other method on this page gains as much. With Muon, every 4 steps in
2 bits needs 2 % fewer steps than DDP.
""",
    "plain": """\
Above, weights begin as GPT-2's do: what is added to a residual connection starts small. Here all weights begin equally
large. Then learning rates cannot be as high, and a look-ahead wants half the rate that is best without it.
""",
}

if __name__ == "__main__":
    measured = whole()
    PAGE.write_text(page(measured), encoding="utf-8")
    write_picture(picture(measured[0]), DOCS / PICTURE)
    print(f"written: {PAGE}")
