"""Prices of the methods' compute: one number per segment of the very program, and no number without work."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import EVERY, label

from thinwire import GTopK, OkTopk
from thinwire.core.methods.acp import ACP
from thinwire.core.methods.cast import Cast
from thinwire.core.methods.dgc import DGC
from thinwire.core.methods.powersgd import PowerSGD
from thinwire.core.methods.registry import METHODS
from thinwire.core.methods.sign import SignSGD
from thinwire.core.methods.ssgd import SSGD
from thinwire.core.methods.topk import TopK
from thinwire.core.pricing.costs import Costs, Linear, assumed_compute
from thinwire.core.pricing.profiles import ModelProfile, TensorTime
from thinwire.core.program import Topology
from thinwire.core.program.trace import trace
from thinwire.predict.timeline import simulate

COSTS = Costs({}, assumed_compute())
PASSES = Costs({}, {"memory": Linear(0, 0.25), **dict.fromkeys(("select", "multiply", "orthogonalise"), Linear(0, 0))})
MORE = [
    ACP(error_feedback=False),
    PowerSGD(deterministic=True),
    PowerSGD(error_feedback=False),
    SignSGD(error_feedback=False, vote="majority"),
    TopK(1.0),
    TopK(0.1, error_feedback=False),
    GTopK(0.1, error_feedback=False),
    OkTopk(1.0),
    DGC(0.1, nesterov=True, clip=1.0, masking=False, weight_decay=0.1),
]
SHAPES = [
    [(64, 48)],
    [(7,), ()],
    [(33, 5, 3), (129,), (40, 40)],
    [(200, 6), (6, 200), (0, 4)],
    [(1, 1)],
]


def test_every_method_is_priced():
    assert {method.name for method in EVERY} == set(METHODS)


@pytest.mark.parametrize("method", EVERY + MORE, ids=label)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_one_number_per_segment(method, ranks):
    for shapes in SHAPES:
        for phase in range(method.phases):
            named = [(f"t{i}", shape) for i, shape in enumerate(shapes)]
            steps = trace(method, named, Topology(ranks), step=(method.phases << 40) + phase)
            seconds = method.compute_seconds(shapes, phase, Topology(ranks), COSTS)
            assert len(seconds) == len(steps) + 1
            assert all(s >= 0 for s in seconds)
            assert (sum(seconds) > 0) == bool(steps)


@pytest.mark.parametrize("method", [*EVERY, *MORE, Cast(collective="three_phase"), Cast(collective="torus")], ids=label)
@pytest.mark.parametrize("topology", [Topology(3), Topology(4, 2)], ids=str)
def test_what_has_no_elements_takes_no_time(method, topology):
    nothing = ModelProfile("nothing", (TensorTime("0", (0, 3), 1.0),), 0.5)
    assert not trace(method, [("0", (0, 3))], topology)
    wire = Costs.of_link(1e9, 1e-3, topology.world_size, topology.layout[0], compute=assumed_compute())
    assert simulate(method, nothing, topology, wire).step_seconds == 1.5


FIXED = [m for m in EVERY + MORE if m.options().get("exchange") != "auto"]  # "auto" weighs messages too


@pytest.mark.parametrize("method", FIXED, ids=label)
@given(n=st.integers(1, 300), m=st.integers(1, 300), ranks=st.integers(2, 64))
def test_more_elements_cost_more(method, n, m, ranks):
    for phase in range(method.phases):
        small = sum(method.compute_seconds([(64, 64), (n, m)], phase, Topology(ranks), COSTS))
        large = sum(method.compute_seconds([(64, 64), (n, m), (256, 256)], phase, Topology(ranks), COSTS))
        assert large > small


def passes(method, shape, ranks=4, phase=0):
    return method.compute_seconds([shape], phase, Topology(ranks), PASSES)


def beside(method):
    """What nine dense elements beside a matrix add."""
    both, alone = (
        method.compute_seconds(shapes, 0, Topology(4), PASSES) for shapes in ([(100, 100), (9,)], [(100, 100)])
    )
    return [a - b for a, b in zip(both, alone)]


def test_passes_counted_by_hand():
    d = 1000
    assert passes(SSGD(), (d,)) == [2 * d, 0]
    assert passes(SSGD(deterministic=True), (d,)) == [2 * d, 0, 2 * d]
    assert passes(SSGD(deterministic=True), (d,), ranks=3) == [4 * d, 0, 2 * d]
    assert passes(SignSGD(), (d,)) == pytest.approx([(3 + 3.6 + 4) * d, (1 + 16 + 2) * d])
    # A: 3 to make, 2 to peel; the factor is packed. Then its check, its mean and A's place written.
    assert passes(ACP(rank=4), (100, 100)) == [5e4 + 2 * 400, 1e4 + 3 * 400]
    assert passes(ACP(rank=4), (100, 100), phase=1) == [6e4 + 2 * 400, 1e4 + 3 * 400]
    assert passes(ACP(rank=4), (100,)) == [200, 100]
    assert beside(ACP(rank=4)) == [4 * 9, 5 * 9]
    assert beside(PowerSGD(rank=4)) == [4 * 9, 0, 5 * 9]
    assert passes(PowerSGD(rank=4), (50, 100)) == [4 * 5000 + 2 * 200, 3 * 5000 + 2 * 400, 5000 + 200 + 3 * 400]
    assert passes(PowerSGD(rank=4), (100, 50)) == passes(PowerSGD(rank=4), (50, 100))


def test_a_missing_curve_is_named():
    with pytest.raises(LookupError, match="'memory'"):
        SSGD().compute_seconds([(4,)], 0, Topology(2), Costs({}))
