"""Steps for one of DDP's, each row at the rate that serves it best: what a step of each method is worth.

``python benchmarks/race.py --size 1m`` trains what is not cached yet over whole runs, whose learning rate rises and
falls, on ranks that nothing slows down, and writes ``results/race.json``, and from it the table that ``thinwire plan``
and ``"auto"`` go by. Losses do not depend on the machine's speed, so other work may go on beside it. Rows of that file
without a schedule are to a loss early in a run, measured before thinwire 0.3; ``"ships"`` says what the table has.
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
    trajectories,
    whole_factors,
    whole_runs,
)
from thinwire.tools.bench.rows import Row, parse_rows

SIZES = {
    "xs": "chargpt:layers=3:width=96:heads=3",
    "1m": "chargpt:layers=4:width=144:heads=4",
    "3m": "chargpt:layers=6:width=208:heads=4",
    "10m": "chargpt:layers=8:width=320:heads=8",
}
WHOLE_LOCAL = (
    *(f"local:sync_every={h}:codec=int2" for h in (4, 8, 16, 64)),
    *(f"local:sync_every={h}:codec=int2:fragment_sync_delay={d}" for h, d in ((4, 1), (8, 3), (16, 7), (64, 15))),
    "local:sync_every=4:codec=int1",
)
MANY = WHOLE_LOCAL[:1]
"""With more than 8 workers: longer periods cost nearly all that the others gain, and are not planned with."""
WHOLE = ",".join(
    [
        "ddp,alone,accumulate:every=4,ssgd:look=0.5",
        *WHOLE_LOCAL,
        *(f"local:sync_every={h}:codec=int1:look=0.5" for h in (4, 8, 16)),
        "torch-powersgd:rank=4,local:sync_every=32:codec=none",
    ]
)
"""Rows of whole runs; of local steps all are needed before any is planned with, or ``MANY``."""
RECIPE = "lr=0.0028:beta2=0.95:decay=0.1:clip=1:held_out=64:scaled_init=true"
"""How language models are trained as a rule, at the rate that is best for DDP here."""
RESULTS = Path(__file__).parent / "results" / "race.json"


def whole(
    track: TrainingSetup, rows: tuple[Row, ...], seeds: int, rates: list[float], known: dict[str, Any] | None
) -> dict[str, dict[str, Any]]:
    """Rates, final losses and steps over DDP's of every row. ``known``: DDP, if it was trained before."""
    launch = functools.partial(lab.run, lab.Cluster.parse(track.workers, 1, None, None))

    def run(labels: Sequence[str], factor: float, seed: int, share: float) -> dict[str, Trajectory]:
        steps = round(share * track.steps)
        print(f"... {', '.join(labels)}: {steps} steps, rate x {factor:.3g}, seed {seed}", file=sys.stderr, flush=True)
        one = replace(track, steps=steps, every=max(1, steps // 8))
        found = trajectories(one, [row for row in rows if row.label in labels], factor, seed, launch)
        for label in (label for label in found if found[label].error):
            print(f"    {label} failed: {found[label].error}", file=sys.stderr, flush=True)
        return found

    base = None if known is None else (WholeRun(known["rate"], tuple(known["finals"])), known["power"])
    finals, power = whole_runs(run, [row.label for row in rows], seeds, rates=rates, known=base)
    worth = whole_factors(finals, power)
    trained = [row.label for row in rows]
    return {label: asdict(finals[label]) | {"factors": worth[label].factors, "power": power} for label in trained}


def planned(one: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of some runs as the planner's table has them."""
    track = one["track"]
    about = {"elements": one["elements"], "workers": track["workers"]}
    about["steps"] = track["steps"] if track["schedule"] else 0
    rows = parse_rows(",".join(found["methods"] for found in one["rows"].values()))
    told = [(planner_row(row), one["rows"][row.label]["factors"]) for row in rows]
    return [said | about | {"factors": factors} for said, factors in told if said is not None]


def ship(known: list[dict[str, Any]]) -> None:
    """Write the table that ``thinwire plan`` and ``"auto"`` go by."""
    lines = ",\n".join(json.dumps(row) for one in known if one["ships"] for row in planned(one))
    TABLE.write_text(f'{{"rows": [\n{lines}\n]}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1m")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1504)
    parser.add_argument("--rates", type=float, nargs="+", default=[], help="factors on the rate, instead of a search")
    parser.add_argument("--methods", default=WHOLE)
    parser.add_argument("--seeds", type=int, default=3, help="at the rate that is best on the first")
    parser.add_argument("--optimizer", default="adamw", choices=("adamw", "muon"))
    parser.add_argument("--plain-init", action="store_true", help="all weights begin alike")
    parser.add_argument("--apart", action="store_true", help="each rank trains on its own share of the text")
    told = parser.parse_args()
    model = SIZES[told.size] + (f":shares={told.workers}" if told.apart else "")
    recipe = RECIPE.replace(":scaled_init=true", "") if told.plain_init else RECIPE
    other = ":optimizer=muon" if told.optimizer == "muon" else ""
    track = TrainingSetup(f"{model}:{recipe}{other}", told.workers, told.steps, rate=None, schedule=True)
    about = {key: value for key, value in asdict(track).items() if key != "speeds"}  # all are as fast
    mine = {"size": told.size, "track": about, "share": 1.0}

    def trained() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
        return known, [one for one in known if {key: one[key] for key in mine} == mine]

    methods = told.methods.split(",")
    base = next((one["rows"]["ddp"] for one in trained()[1]), None) if "ddp" not in methods else None
    found = whole(track, parse_rows(told.methods), told.seeds, told.rates, base)
    text = {row.label: part for part in methods for row in parse_rows(part)}
    rows = {label: {"methods": text[label], **one} for label, one in found.items()}
    known, before = trained()
    for one in before:  # its rows that are not trained now stay: DDP, which all are held against, trains as it did
        rows = one["rows"] | rows
        known.remove(one)
    # of ranks whose data is alike, and with all local steps: a period of one model would be held against another's
    ships = not told.apart and not other and not told.plain_init
    needed = WHOLE_LOCAL if told.workers <= 8 else MANY
    ships = ships and {row.label for row in parse_rows(",".join(needed))} <= rows.keys()
    about = {"elements": build_model(track.model).parameters, "rates": told.rates, "ships": ships}
    known.append(mine | about | {"rows": rows})
    RESULTS.write_text(json.dumps(known, indent=2) + "\n")
    ship(known)
    factors = {label: StepsFactor(one["rate"], one["factors"]) for label, one in found.items()}
    for label, factor in sorted(factors.items(), key=lambda pair: pair[1].median or float("inf")):
        ends = " to ".join("never" if end is None else f"{end:.2f}" for end in factor.ends)
        print(f"{label:58} rate x {factor.rate:<4g} steps {factor.median or float('nan'):.2f} ({ends})")


if __name__ == "__main__":
    main()
