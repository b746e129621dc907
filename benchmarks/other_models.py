"""``thinwire race`` as a user runs it, on models other than the character GPT. ``python benchmarks/other_models.py``

A convolutional network on real digits, a ResNet-18 with batch norm under SGD with momentum, and BERT-small under AdamW.
Seconds per step are measured, so run it alone. Writes ``benchmarks/results/other_models.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from in_lab import keep

RESULTS = Path(__file__).parent / "results" / "other_models.json"
RACES = [  # model, link, minutes
    ("digits", "100mbit", 4),
    ("resnet18:width=32", "100mbit", 10),
    ("resnet18:width=32", "1gbit", 10),
    ("bert-small", "1gbit", 20),
]
WORKERS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="*", default=range(len(RACES)), help="of the races")
    told = parser.parse_args()
    for model, link, minutes in (RACES[number] for number in told.only):
        load = round(os.getloadavg()[0], 1)
        with tempfile.TemporaryDirectory() as out:
            words = [model, "--link", link, "--workers", str(WORKERS), "--minutes", str(minutes), "--out", out]
            verb = [sys.executable, "-c", "from thinwire.tools.cli.main import run; run()", "race"]
            subprocess.run([*verb, *words], check=True)
            race = json.loads((Path(out) / "race.json").read_text())["race"]
        kept = {"model": model, "link": link, "workers": WORKERS, "minutes": minutes, "load_before": load}
        keep(RESULTS, kept | {name: race[name] for name in ("winner", "sentences", "ddp_steps", "budget", "rows")})


if __name__ == "__main__":
    main()
