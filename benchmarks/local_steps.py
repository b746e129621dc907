"""What local steps cost beside compute alone, on slow links. ``python benchmarks/local_steps.py``

In the lab, a character GPT of 3.3 M parameters: the mean step over whole periods, rows in turns on the same ranks, DDP
and powersgd beside them; then at 10 Mbit/s with the period that is measured. Also CPU seconds of the training thread,
over those of compute alone. Writes ``benchmarks/results/local_steps.json``.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from in_lab import keep, run

RESULTS = Path(__file__).parent / "results" / "local_steps.json"
MODEL = "chargpt:layers=6:width=208:heads=4"
EVERY_8 = "local:sync_every=8:codec=int8"
ROWS = f"ddp,cast:dtype=int8,powersgd:rank=4,{EVERY_8},{EVERY_8}:fragment_sync_delay=3,local"
NETWORKS = [(2, "100mbit", ROWS), (4, "100mbit", ROWS), (2, "10mbit", "powersgd:rank=4,local,local:codec=int2")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", type=int, nargs="*", default=range(len(NETWORKS)), help="of the networks")
    told = parser.parse_args()
    for workers, link, rows in (NETWORKS[number] for number in told.only):
        found = run(MODEL, rows, workers, link, steps=told.steps, rounds=told.rounds)
        alone = found.compute_seconds
        print(f"\n{workers} workers, {link}: compute alone {alone * 1e3:.0f} ms")
        for row in found.rows[1:]:
            print(
                f"  {row.label:55} {row.step_seconds * 1e3:8.0f} ms, {row.step_seconds / alone:6.3f} of it {row.error}"
            )
        keep(RESULTS, {"model": MODEL, "workers": workers, "link": link, "result": asdict(found)})


if __name__ == "__main__":
    main()
