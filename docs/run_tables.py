"""The tables of "Local steps: what they cost", and its picture: ``python docs/run_tables.py`` draws it.

Both are of ``benchmarks/results/race.json``.
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
PICTURE = DOCS / "images" / "long_runs.png"
RESULTS = DOCS.parent / "benchmarks" / "results" / "race.json"
BITS = {"int8": 8.125, "int4": 4.125, "int2": 2.125, "int1": 1.125}
"""Of an element, its share of a block's scale of 32 bits included."""
LOCAL = {"local": "local", "diloco": "DiLoCo"}
TRIED = ("local_variants:second_moments", "local_variants:growing")
"""Rows of benchmarks/local_variants.py, which gained nothing: they stay in the record."""
PLACE = 12  # bits that say which of 4,096 numbers is sent
OTHERS = {
    "local_variants:sparse_loco": (
        "SparseLoCo, every 32, the largest 2 % in 2 bits",
        0.02 * (2 + PLACE) / 32 / 32,
    ),
    "local_variants:demo": ("DeMo", 32 / 4096 * (32 + PLACE) / 32),
}
"""Rows of others in that file: what they are called, and their share of DDP's bytes."""
KINDS = (
    "usual",
    "larger",
    "largest",
    "short",
    "workers",
    "eight",
    "sixteen",
    "muon",
    "muon4",
    "muon8",
    "plain",
)


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
    return sorted(runs, key=lambda one: KINDS.index(kind(one)))


def kind(one: dict[str, Any]) -> str:
    """What is special about some runs: one of ``KINDS``."""
    model, workers, steps = (one["track"][key] for key in ("model", "workers", "steps"))
    if "muon" in model:
        return {2: "muon", 4: "muon4", 8: "muon8"}[workers]
    if "scaled_init" not in model:
        return "plain"
    if one["elements"] > 2e6:
        return "largest" if one["elements"] > 5e6 else "larger"
    if workers > 4:
        return "sixteen" if workers > 8 else "eight"
    return "workers" if workers > 2 else "short" if steps < 1000 else "usual"


def sent(methods: str, model: str = "") -> float:
    """Bytes of a row over those of DDP."""
    if methods in OTHERS:
        return OTHERS[methods][1]
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
    if row.kind not in LOCAL:
        return BITS.get(str(row.options.get("dtype")), 32) / 32
    bits = BITS.get(str(row.options.get("codec")), 32)
    return bits / 32 / int(row.options["sync_every"])


def named(methods: str) -> str:
    """A row in words."""
    if methods in OTHERS:
        return OTHERS[methods][0]
    (row,) = parse_rows(methods)
    look = f", look {row.options['look']}" if "look" in row.options else ""
    if row.kind in LOCAL:
        late = row.options.get("fragment_sync_delay")
        bits = str(row.options.get("codec", "none")).removeprefix("int")
        said = f"{LOCAL[row.kind]}, every {row.options['sync_every']}"
        bits = "32" if bits == "none" else bits
        said += f" in {bits} bit{'s' * (bits != '1')}"
        if "fragments" in row.options:
            said += f", {row.options['fragments']} fragments"
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


def table(name: str) -> str:
    """The rows of one of ``KINDS``, the lowest loss first."""
    (one,) = (one for one in whole() if kind(one) == name)
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
    # Of local steps merged late the first table has those with short periods, and this is enough.
    hidden = "delay=(7|15)$" if name == "usual" else "^local .*delay"
    for label in sorted(one["rows"], key=lambda label: finals(one, label)):
        row = one["rows"][label]
        if re.search(hidden, label):
            continue
        share, loss = sent(row["methods"], one["track"]["model"]), finals(one, label)
        factors = sorted(x for x in row["factors"] if x is not None)
        steps = f"{statistics.median(factors):.2f}"
        if len(factors) > 1 and label != "ddp":
            steps += f" ({factors[0]:.2f} to {factors[-1]:.2f})"
        bytes_ = "nothing" if not share else "1" if share == 1 else f"1/{1 / share:.0f}"
        lines.append(f"| {named(row['methods'])} | {bytes_} | {loss:.3f} | {steps} |")
    return "\n".join(lines)


def panel(one: dict[str, Any]) -> Panel:
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
            r"(?:local|DiLoCo), every (\d+)(.*?)(?: merged (\d+) late)?(, look.*)?",
            name,
        ):
            every = found[1]
            late = {None: "", "1": ", merged 1 late"}.get(found[3], ", merged late")
            kept = found[2].replace(" in ", " ").strip(", ")
            kept = f"{name.split(',')[0]}, {kept}"
            family = f"{kept}{late}{found[4] or ''}"  # a colour for each
        at = sent(row["methods"], one["track"]["model"]) * exact
        families.setdefault(family, []).append((at, loss, every))
    series = []
    for family, points in families.items():
        x, y, every = zip(*sorted(points, reverse=True))
        said = f"every {', '.join(every)}" if every[0] else ""
        series.append(
            Series(family, x, y, "line" if len(x) > 1 else "points", said=said)
        )
    losses = [finals(one, label) for label in one["rows"]]
    room = (max(losses) - min(losses)) / 7
    inner = ", Muon" if "muon" in one["track"]["model"] else ""
    return Panel(
        f"MB sent per step; {workers} workers, {one['elements'] / 1e6:.2g} million parameters{inner}",
        "final held-out loss",
        tuple(series),
        levels=tuple(levels),
        y_range=(min(losses) - room / 2, max(losses) + room),  # for a level's words
        log_x=True,
    )


def picture() -> Picture:
    """A panel for each number of workers."""
    kinds = ("usual", "workers", "eight", "sixteen", "muon8")
    shown = [one for one in whole() if kind(one) in kinds]
    return Picture("GPTs, whole runs of 1,504 steps", tuple(map(panel, shown)))


if __name__ == "__main__":
    write_picture(picture(), PICTURE)
    print(f"written: {PICTURE}")
