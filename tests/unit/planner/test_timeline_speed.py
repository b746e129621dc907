import random
import time

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


def seconds_of(chosen, profile, workers=WORKERS):
    first = method("acp", compress="matrices")  # torch loads its rules of shapes: seconds, once per process
    simulate(first, profile_of([(64, 64), (65, 64)]), Topology(2), Costs.of_link(1e9, 1e-4, 2))
    begin = time.process_time()  # not what other processes take
    simulate(chosen, profile, Topology(workers), Costs.of_link(1e9, 1e-4, workers))
    return time.process_time() - begin


@pytest.mark.parametrize("fusion", ["auto", "none"])
def test_a_thousand_different_tensors(fusion):
    draw = random.Random(0)
    took = seconds_of(SSGD(fusion=fusion), profile_of([(draw.randint(64, 1024), 512) for _ in range(1000)]))
    print(f"ssgd, fusion={fusion}: {took:.2f} s")
    assert took < 1


@pytest.mark.parametrize("name", METHODS)
def test_a_thousand_tensors_of_a_few_shapes(name):
    shapes = [(64 * (1 + i % 12), 512) for i in range(1000)]
    sparse = name.endswith("topk") or name == "omgs"
    chosen = method(name, fusion="none", **({"density": 0.001} if sparse else {}))
    took = seconds_of(chosen, profile_of(shapes), 127 if name == "terngrad" else WORKERS)  # int8 sums
    print(f"{name}: {took:.2f} s")
    assert took < (2 if name == "gtopk" else 1)  # 15 exchanges a bucket
