"""Steps to DDP's loss, each row at the rate that serves it best: what a step of each method is worth.

``python benchmarks/race.py --size 1m`` trains what is not cached yet, on ranks that nothing slows down, and writes
``results/race.json``, and from it the table that ``thinwire plan`` and ``"auto"`` go by. With ``--whole 1504`` rows
train over whole runs of so many steps, with a learning rate that rises and falls. Losses do not depend on the machine's
speed, so other work may go on beside it.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from thinwire.predict.choose.worth import TABLE
from thinwire.tools import lab
from thinwire.tools.bench.models.registry import build_model
from thinwire.tools.bench.race_answer import planner_row
from thinwire.tools.bench.race_losses import (
    StepsFactor,
    TrainingSetup,
    Trajectory,
    WholeRun,
    steps_factors,
    trajectories,
    whole_factors,
    whole_runs,
)
from thinwire.tools.bench.rows import Row, parse_rows

SIZES = {
    "1m": "chargpt:layers=4:width=144:heads=4",
    "3m": "chargpt:layers=6:width=208:heads=4",
    "10m": "chargpt:layers=8:width=320:heads=8",
}
COMPRESSED = "cast:dtype=int8,cast:dtype=int4,cast:dtype=int2,powersgd:rank=4,acp:rank=4,acp:rank=16,topk:density=0.01"
WAITED = {"int8": (2, 4, 8, 16, 32), "int2": (8, 16, 32, 64), "none": (8,)}
OVERLAPPED = {
    "int8": ((4, 1), (8, 1), (4, 3), (8, 3), (16, 3), (8, 7), (16, 7), (32, 7)),
    "int2": ((8, 1), (8, 3), (16, 3), (16, 7), (32, 7), (32, 15), (64, 15)),
}
ROWS = ",".join(
    [
        "ddp",
        COMPRESSED,
        *(f"local:sync_every={h}:codec={c}" for c, periods in WAITED.items() for h in periods),
        *(f"local:sync_every={h}:codec={c}:fragment_sync_delay={d}" for c, some in OVERLAPPED.items() for h, d in some),
    ]
)
WHOLE_LOCAL = (
    *(f"local:sync_every={h}:codec=int2" for h in (4, 8, 16, 64)),
    *(f"local:sync_every={h}:codec=int2:fragment_sync_delay={d}" for h, d in ((4, 1), (8, 3), (16, 7), (64, 15))),
    "local:sync_every=4:codec=int1",
)
WHOLE = ",".join(
    [
        "ddp,alone,accumulate:every=4,ssgd:look=0.5",
        *WHOLE_LOCAL,
        *(f"local:sync_every={h}:codec=int1:look=0.5" for h in (4, 8, 16)),
        "torch-powersgd:rank=4,local:sync_every=32:codec=none",
    ]
)
"""Rows of whole runs; of local steps all are needed before any is planned with."""
RECIPE = "lr=0.0028:beta2=0.95:decay=0.1:clip=1:held_out=64:scaled_init=true"
"""How language models are trained as a rule, at the rate that is best for DDP here."""
RESULTS = Path(__file__).parent / "results" / "race.json"


def factors(
    track: TrainingSetup, rows: tuple[Row, ...], share: float, rates: list[float], tuned_on: list[int]
) -> dict[str, StepsFactor]:
    """Of every row."""
    launch = functools.partial(lab.run, lab.Cluster.parse(track.workers, 1, None, None))

    def run(labels: Sequence[str], factor: float, seed: int) -> dict[str, Trajectory]:
        told = f"{track.model}, {track.workers} workers: rate x {factor:g}, seed {seed}, {len(labels)} rows"
        print(f"... {told}", file=sys.stderr, flush=True)
        return trajectories(track, [row for row in rows if row.label in labels], factor, seed, launch)

    labels = [row.label for row in rows]
    return steps_factors(run, labels, "ddp", share, reach=2 * track.every, rates=rates, tuned_on=tuned_on)


def whole(
    track: TrainingSetup, rows: tuple[Row, ...], seeds: int, rates: list[float], known: dict[str, Any] | None
) -> dict[str, dict[str, Any]]:
    """Rates, final losses and steps over DDP's of every row. ``known``: DDP, if it was trained before."""
    launch = functools.partial(lab.run, lab.Cluster.parse(track.workers, 1, None, None))

    def run(label: str, factor: float, seed: int, share: float) -> Trajectory:
        steps = round(share * track.steps)
        print(f"... {label}: {steps} steps, rate x {factor:.3g}, seed {seed}", file=sys.stderr, flush=True)
        one = replace(track, steps=steps, every=max(1, steps // 8))
        return trajectories(one, [row for row in rows if row.label == label], factor, seed, launch)[label]

    base = None if known is None else (WholeRun(known["rate"], tuple(known["finals"])), known["power"])
    finals, power = whole_runs(run, [row.label for row in rows], seeds, rates=rates, known=base)
    worth = whole_factors(finals, power)
    trained = [row.label for row in rows]
    return {label: asdict(finals[label]) | {"factors": worth[label].factors, "power": power} for label in trained}


def ship(known: list[dict[str, Any]]) -> None:
    """Write the table that ``thinwire plan`` and ``"auto"`` go by: of ranks whose data is alike.

    Of a size with some of the rows alone nothing is in it: a period of one model would be held against another's.
    """
    rows = []
    for one in known:
        track = one["track"]
        model, whole = track["model"], track["schedule"]
        needed = {row.label for row in parse_rows(",".join(WHOLE_LOCAL) if whole else ROWS)}
        other = "shares" in model or "muon" in model or (whole and RECIPE not in model)
        if other or not needed <= one["rows"].keys():
            continue
        about = {"elements": one["elements"], "workers": track["workers"], "steps": track["steps"] if whole else 0}
        for row in parse_rows(",".join(found["methods"] for found in one["rows"].values())):
            if (said := planner_row(row)) is not None:
                rows.append(said | about | {"factors": one["rows"][row.label]["factors"]})
    lines = ",\n".join(json.dumps(row) for row in rows)
    TABLE.write_text(f'{{"rows": [\n{lines}\n]}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1m")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--share", type=float, default=0.4, help="of DDP's run, at which its loss is the target")
    parser.add_argument("--rates", type=float, nargs="+", help="factors on the rate; of whole runs, one is searched")
    parser.add_argument("--tune-on", type=int, nargs="+", default=[0, 1, 2], help="seeds whose median says which rate")
    parser.add_argument("--methods")
    parser.add_argument("--whole", type=int, help="steps of whole runs, instead of runs to a loss")
    parser.add_argument("--seeds", type=int, default=3, help="of whole runs, at the rate that is best on the first")
    parser.add_argument("--optimizer", default="adamw", choices=("adamw", "muon"))
    parser.add_argument("--plain-init", action="store_true", help="all weights begin alike, in whole runs")
    parser.add_argument("--apart", action="store_true", help="each rank trains on its own share of the text")
    told = parser.parse_args()
    model = SIZES[told.size] + (f":shares={told.workers}" if told.apart else "")
    track, share = TrainingSetup(model, told.workers, told.steps), told.share
    rates = told.rates or ([] if told.whole else [0.5, 1.0, 2.0, 4.0])
    methods = told.methods or (WHOLE if told.whole else ROWS)
    if told.whole:
        other = ":optimizer=muon" if told.optimizer == "muon" else ""
        recipe = RECIPE.replace(":scaled_init=true", "") if told.plain_init else RECIPE
        track = TrainingSetup(
            f"{model}:{recipe}{other}",
            told.workers,
            told.whole,
            rate=None,
            schedule=True,
        )
        share = 1.0
    mine = {"size": told.size, "track": asdict(track), "share": share}

    def trained() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
        return known, [one for one in known if {key: one[key] for key in mine} == mine]

    if told.whole:
        base = next((one["rows"]["ddp"] for one in trained()[1]), None) if "ddp" not in methods.split(",") else None
        finals = whole(track, parse_rows(methods), told.seeds, rates, base)
        found = {label: StepsFactor(one["rate"], one["factors"]) for label, one in finals.items()}
    else:
        finals, found = {}, factors(track, parse_rows(methods), share, rates, told.tune_on)
    text = {row.label: part for part in methods.split(",") for row in parse_rows(part)}
    rows = {
        label: {"methods": text[label], "rate": one.rate, "factors": one.factors} | finals.get(label, {})
        for label, one in found.items()
    }
    known, before = trained()
    for one in before:  # its rows that are not trained now stay: DDP, which all are held against, trains as it did
        rows = one["rows"] | rows
        known.remove(one)
    known.append(mine | {"elements": build_model(track.model).parameters, "rates": rates, "rows": rows})
    RESULTS.write_text(json.dumps(known, indent=2) + "\n")
    ship(known)
    for label, one in sorted(found.items(), key=lambda pair: pair[1].median or float("inf")):
        ends = " to ".join("never" if end is None else f"{end:.2f}" for end in one.ends)
        print(f"{label:58} rate x {one.rate:<4g} steps {one.median or float('nan'):.2f} ({ends})")


if __name__ == "__main__":
    main()
