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
    sys.path[:0] = [str(here), str(here.parent / "unit"), str(here.parent)]

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
        generators = run.card.names["torch.Generator"]
    return Counter(map(str, run.card.findings)), Counter(map(str, waits)), launches, generators


def counts(name):
    _, waits, launches, _ = ran(name)
    return {"waits": sum(waits.values()), "launches": launches}


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_found(name):
    assert not ran(name)[0]


@pytest.mark.parametrize("name", CASES)
def test_counts(name):
    if "histogram" in name:
        pytest.importorskip("triton", reason="its kernel is one launch, torch's are several")
    assert counts(name) == json.loads(GOLDEN.read_text())[name], ran(name)[1]


@pytest.mark.parametrize("name", sorted(set(CASES) - set(WAITING)))
def test_a_steady_step_never_waits(name):
    assert not ran(name)[1]


@pytest.mark.parametrize("name", ["qsgd", "terngrad", "DDP, qsgd"])
def test_no_generator_is_made_in_a_step(name):
    assert ran(name)[3] == 0


@pytest.mark.parametrize("name", [name for name in WAITING if name.startswith("unused")])
def test_what_nobody_uses_is_read_once_a_step(name):
    assert sum(ran(name)[1].values()) == COUNTED


@pytest.mark.parametrize("name", [name for name in WAITING if "K-FAC" in name and "eigen" not in name])
def test_inverting_waits_for_no_single_factor(name):
    """``torch.linalg.eigh`` waits by itself."""
    assert not any("core/kernels/symmetric.py" in one for one in ran(name)[1])


@pytest.mark.parametrize("name", ["acp-rank=2-min_rate=1.0", "powersgd-rank=2-min_rate=1.0"])
def test_low_rank_waits_once_to_compare_its_bases(name):
    with CASES[name]() as run:
        run.step()  # the plan is made again
        run.card.waits.clear()
        for _ in range(STEPS):
            run.step()
        assert [one.where.split(":")[0] for one in run.card.waits] == ["core/methods/lowrank.py"]


def test_the_file_has_no_other_cases():
    assert list(json.loads(GOLDEN.read_text())) == list(CASES)


if __name__ == "__main__":
    rows = [f"  {json.dumps(name)}: {json.dumps(counts(name))}" for name in CASES]
    GOLDEN.write_text("{\n" + ",\n".join(rows) + "\n}\n")
