"""Planning stays quick for models of a thousand tensors: counted in calls of Python, which no busy machine changes."""

import random
import sys

import pytest

from thinwire.core.methods.registry import METHODS, method
from thinwire.core.methods.ssgd import SSGD
from thinwire.core.pricing.costs import Costs
from thinwire.core.pricing.profiles import ModelProfile, TensorTime
from thinwire.core.program import Topology
from thinwire.predict.timeline import simulate

pytestmark = pytest.mark.slow

WORKERS = 10_000


def profile_of(shapes):
    tensors = tuple(TensorTime(f"m{i}.weight", shape, 1e-4) for i, shape in enumerate(shapes))
    return ModelProfile("thousand", tensors, 0.05)


def calls_of(chosen, profile, workers=WORKERS):
    calls = 0

    def count(frame, event, _):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        simulate(chosen, profile, Topology(workers), Costs.of_link(1e9, 1e-4, workers))
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("fusion", ["auto", "none"])
def test_a_thousand_different_tensors(fusion):
    draw = random.Random(0)
    calls = calls_of(SSGD(fusion=fusion), profile_of([(draw.randint(64, 1024), 512) for _ in range(1000)]))
    print(f"ssgd, fusion={fusion}: {calls} calls")
    assert calls < 300_000


@pytest.mark.parametrize("name", METHODS)
def test_a_thousand_tensors_of_a_few_shapes(name):
    shapes = [(64 * (1 + i % 12), 512) for i in range(1000)]
    sparse = name.endswith("topk") or name == "omgs"
    chosen = method(name, fusion="none", **({"density": 0.001} if sparse else {}))
    calls = calls_of(chosen, profile_of(shapes), 127 if name == "terngrad" else WORKERS)  # int8 sums
    print(f"{name}: {calls} calls")
    assert calls < (2_000_000 if name == "gtopk" else 500_000)  # 15 exchanges a bucket
