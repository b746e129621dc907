"""How many one-way delays each method's step takes in a row: exact counts, kept in tests/golden/turns.json.

``python tests/unit/planner/test_turns.py`` writes the file again, after a change that is meant.
"""

import json
import sys
from pathlib import Path

import pytest

from thinwire.core.methods.registry import METHODS, method
from thinwire.core.pricing.costs import Costs, Linear
from thinwire.core.pricing.profiles import ModelProfile, TensorTime
from thinwire.core.program import Topology
from thinwire.predict.timeline import simulate

GOLDEN = Path(__file__).parents[2] / "golden" / "turns.json"
NEED = ("topk", "gtopk", "oktopk", "mstopk", "hitopk", "omgs")
WORKERS = (2, 4, 16)
PROFILE = ModelProfile(
    "four layers",
    tuple(TensorTime(f"m{i}.{name}", shape, 0.0) for i in range(4) for name, shape in (("w", (64, 48)), ("b", (48,)))),
    0.0,
)


def counted(name):
    """With compute, bytes and start-ups free, a step takes its delays."""
    given = {"density": 0.05} if name in NEED else {}
    free = dict.fromkeys(("memory", "select", "multiply", "thin", "orthogonalise"), Linear(0, 0))
    found = {}
    for workers in WORKERS:
        costs = Costs.of_link(1e300, 0.0, workers, delay_seconds=1.0, compute=free)
        step = simulate(method(name, **given), PROFILE, Topology(workers), costs, steps=3)
        found[str(workers)] = round(step.step_seconds, 6)
    return found


@pytest.mark.parametrize("name", METHODS)
def test_delays_in_a_row(name):
    assert counted(name) == json.loads(GOLDEN.read_text())[name]


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: counted(name) for name in METHODS}, indent=1) + "\n")
    sys.exit()
