"""Differential fuzzing of ``attach``: random scripts on two ranks against plain twins.

python tests/fuzz/run.py --seed 123            one script, and the shortest that fails in the same way
python tests/fuzz/run.py --cases 5000 --from 0 --minutes 30
python tests/fuzz/run.py --script failing.json
python tests/fuzz/run.py --seed 123 --show     print the script only
"""

import argparse
import json
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:
    sys.path.insert(0, str(HERE.parent))

from fuzz.pair import Ranks  # noqa: E402
from fuzz.scripts import make, smaller, text  # noqa: E402


def sort_of(found):
    """What a shorter script must share with the longer one."""
    words = found.words.partition(": ")[2]
    return found.kind, words.partition(" of ")[0] if found.kind == "mismatch" else words[:30], " buffer " in words


def shrink(case, found, ranks, *, seconds=60.0):
    """The shortest script that fails in the same way, and its finding."""
    end = time.monotonic() + seconds
    again = True
    while again and time.monotonic() < end:
        again = False
        for other in smaller(case):
            if not other["events"] or time.monotonic() > end:
                continue
            now = ranks.run(other)
            if now is not None and sort_of(now) == sort_of(found):
                case, found, again = other, now, True
                break
    return case, found


def report(case, found, short):
    """A finding in words: the seed, what is wrong, and the shortest script that fails."""
    lines = [f"seed {case['seed']}: {found}"]
    if short is not None:
        lines += [f"shortest script: {short[1]}", text(short[0]), "run again: python tests/fuzz/run.py --script FILE"]
    return "\n".join([*lines, f"the whole one: python tests/fuzz/run.py --seed {case['seed']}"])


def hunt(seeds, *, ranks, shrinks=60.0, minutes=None, most=None, progress=None):
    """Run the scripts of seeds; ``shrinks``: seconds for each finding. Returns (how many ran, findings as text)."""
    findings, ran, began = [], 0, time.monotonic()
    for seed in seeds:
        if (minutes is not None and time.monotonic() - began > 60 * minutes) or (most and len(findings) >= most):
            break
        case, ran = make(seed), ran + 1
        found = ranks.run(case)
        if found is not None:
            found = ranks.run(case) or found
            short = shrink(case, found, ranks, seconds=shrinks) if shrinks else None
            findings.append(report(case, found, short))
        if progress is not None:
            progress(seed, ran, time.monotonic() - began, findings[-1] if found is not None else None)
    return ran, findings


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--script", type=Path)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--from", type=int, default=0, dest="first")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--no-shrink", action="store_true")
    given = parser.parse_args()
    with Ranks() as ranks:
        if given.seed is not None or given.script is not None:
            case = json.loads(given.script.read_text()) if given.script else make(given.seed)
            print(text(case))
            found = None if given.show else ranks.run(case)
            if found is None:
                print("" if given.show else "no difference")
                return 0
            print(report(case, found, None if given.no_shrink else shrink(case, found, ranks)))
            return 1

        def progress(seed, ran, seconds, finding):
            if finding is not None:
                print(finding, flush=True)
            if ran % 50 == 0:
                print(f"{ran} scripts, up to seed {seed}, {ran / seconds:.1f} per second", flush=True)

        seeds = range(given.first, given.first + given.cases)
        ran, findings = hunt(
            seeds, ranks=ranks, shrinks=0.0 if given.no_shrink else 60.0, minutes=given.minutes, progress=progress
        )
        print(f"{ran} scripts, {len(findings)} findings")
        return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
