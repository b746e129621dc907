"""Every method and every way through the engine on the simulated card.

No race, no early free, no wrong device. How often a steady step waits for the card and how much it launches there is
exact, in ``counts.json``; after a change that is meant, write it anew::

    python tests/simcuda/test_sim_cases.py
"""

import functools
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    sys.path[:0] = [str(here), str(here.parent / "unit")]

from sim_cases import CASES, STEPS, WAITING

GOLDEN = Path(__file__).with_name("counts.json")
COUNTED = 2
"""Steps, the last ones: low rank takes turns, and K-FAC inverts in every second."""


@functools.cache
def ran(name):
    """What is found, where the counted steps wait, and how much they launch."""
    with CASES[name]() as run:
        for step in range(STEPS):
            if step == STEPS - COUNTED:
                run.card.waits.clear()
                run.card.names.clear()
            run.step()
        waits = [one for one in run.card.waits if not one.where.startswith(("test: ", "torch.optim/"))]
        launches = run.card.launches
    return Counter(map(str, run.card.findings)), Counter(map(str, waits)), launches


def counts(name):
    _, waits, launches = ran(name)
    return {"waits": sum(waits.values()), "launches": launches}


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_found(name):
    assert not ran(name)[0]


@pytest.mark.parametrize("name", CASES)
def test_counts(name):
    assert counts(name) == json.loads(GOLDEN.read_text())[name], ran(name)[1]


@pytest.mark.parametrize("name", sorted(set(CASES) - set(WAITING)))
def test_a_steady_step_never_waits(name):
    assert not ran(name)[1]


def test_the_file_has_no_other_cases():
    assert list(json.loads(GOLDEN.read_text())) == list(CASES)


if __name__ == "__main__":
    rows = [f"  {json.dumps(name)}: {json.dumps(counts(name))}" for name in CASES]
    GOLDEN.write_text("{\n" + ",\n".join(rows) + "\n}\n")
