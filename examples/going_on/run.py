"""Loss against seconds while replicas die: three deaths under torchft with acp, and plain DDP, which the first ends.

python examples/going_on/run.py --plot going_on.png
"""

import argparse
import json
import sys
import time
from pathlib import Path

from thinwire import lab
from thinwire.tools.pictures import Mark, Panel, Picture, Series, check_plot, write_picture

SCRIPT = Path(__file__).with_name("train.py")
REPLICAS = 3


def trained(mode, workers, faults, options):
    """Run train.py in the lab. Returns the time and the first line told of each step, and how it ended."""
    told, began = {}, time.monotonic()

    def on_line(rank, line):
        if line.startswith("{"):
            row = json.loads(line)
            told.setdefault(row["step"], (time.monotonic() - began, row))
        elif options.verbose:
            print(f"[{rank}] {line}", file=sys.stderr, flush=True)

    result = lab.run(
        lab.Cluster.parse(workers, link=options.link), [sys.executable, str(SCRIPT), mode], on_line=on_line,
        timeout_seconds=options.seconds, grace_seconds=10.0, faults=faults, env={"RUST_LOG": "error"},
    )  # fmt: skip
    if not told:
        raise SystemExit(f"{mode} has made no step in {options.seconds:g} s: give it more --seconds, or see --verbose")
    return list(told.values()), result


def series(name, told, key, **options):
    return Series(name, tuple(at for at, _ in told), tuple(float(row[key]) for _, row in told), **options)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", default="100mbit", help="of each machine")
    parser.add_argument("--seconds", type=float, default=120.0, help="of each run, imports included")
    parser.add_argument("--plot", type=Path, default=Path("going_on.png"), help=".png or .html")
    parser.add_argument("--verbose", action="store_true", help="what the ranks print")
    options = parser.parse_args()
    check_plot(options.plot)
    deaths = [(2, 0.3), (1, 0.5), (3, 0.7)]  # rank, and when: parts of the whole
    faults = [lab.RankFault("kill", rank, part * options.seconds, 0.03 * options.seconds) for rank, part in deaths]
    going_on, happened = trained("acp", REPLICAS + 1, faults, options)
    plain, _ = trained("ddp", REPLICAS, [lab.RankFault("kill", 1, faults[0].at_seconds)], options)
    (ended, last), (_, best) = plain[-1], going_on[-1]
    for name, (at, row) in (("plain DDP", plain[-1]), ("acp under torchft", going_on[-1])):
        print(f"{name}: step {row['step']} and a loss of {row['loss']:.3f} after {at:.0f} s")
    marks = tuple(Mark(x.seconds, f"replica {x.rank} dies") for x in happened.happenings if x.what == "killed")
    lines = (
        series("acp under torchft", going_on, "loss", said=f"{best['loss']:.2f}"),
        series("plain DDP", plain, "loss", at=(ended, last["loss"]), said=f"{last['loss']:.2f}, ends at {ended:.0f} s"),
    )
    replicas = (series("acp under torchft", going_on, "replicas", look="steps"),)
    write_picture(
        Picture(
            f"Three replicas at {options.link}: each dies once",
            (
                Panel("seconds", "loss", lines, marks),
                Panel("seconds", "replicas in the quorum", replicas, marks, y_range=(0.0, REPLICAS + 2.0)),
            ),
        ),
        options.plot,
    )
    print(f"written: {options.plot}")


if __name__ == "__main__":
    main()
