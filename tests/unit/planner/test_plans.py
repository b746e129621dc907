"""One rule makes the engine's plans and the simulator's."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.core.methods.acp import ACP
from thinwire.core.methods.cast import Cast
from thinwire.core.methods.registry import method as named
from thinwire.core.methods.ssgd import SSGD
from thinwire.core.methods.topk import TopK
from thinwire.core.pricing.costs import Costs
from thinwire.core.pricing.plans import PlanTensor, balanced, by_size, default_fusion, make_plan
from thinwire.core.pricing.profiles import builtin
from thinwire.core.program import Topology
from thinwire.engine.controller.planning import make_plan as engine_plan
from thinwire.engine.parameters import ManagedParameter
from thinwire.predict.choose.explain import explain
from thinwire.predict.timeline.simulate import simulate

KINDS = [(torch.float32, 4), (torch.bfloat16, 2)]


def test_defaults():
    assert [default_fusion(m, b) for m in (SSGD(), ACP()) for b in ("gloo", "nccl")] == [4, 25, "payload", 25]


def test_fusion_by_size():
    tensors = [PlanTensor(f"t{i}", (1 << 18,)) for i in range(5)]  # 1 MiB each
    plan = make_plan(SSGD(fusion=2), tensors, [4, 3, 2, 1, 0], (), "gloo")
    assert [b.names for b in plan.phases[0]] == [("t4", "t3"), ("t2", "t1"), ("t0",)]
    late = make_plan(SSGD(fusion=2), tensors, [4, 3, 2, 1, 0], (3,), "gloo")
    assert [b.names for b in late.phases[0]] == [("t4", "t2"), ("t1", "t0"), ("t3",)]
    assert len(make_plan(SSGD(fusion="none"), tensors, range(5), (), "gloo").phases[0]) == 5
    assert len(make_plan(SSGD(fusion="single"), tensors, range(5), (), "gloo").phases[0]) == 1


@pytest.mark.parametrize("seconds", [0.0, 0.004, 0.1, 0.35, 3.5])
def test_the_balance_of_launches_and_the_exposed_end_is_the_best(seconds):
    def cost(n):
        return 4e-3 * n + seconds / n

    sizes = [1.0] * 4000  # as good as water
    n = len(by_size(sizes, balanced(sizes, seconds)))
    assert cost(n) <= min(cost(other) for other in range(1, 200)) * 1.001


def test_layers_that_are_not_cut_do_not_double_the_buckets():
    layers = [2.25, 2.25, 0.56, 1.69] * 6  # of a transformer, MiB
    greedy = by_size(layers, sum(layers) / 11.4)
    ours = by_size(layers, balanced(layers, 4e-3 * 11.4**2))
    assert len(greedy) > 15
    assert 9 <= len(ours) <= 13


def test_plain_averages_follow_the_network_and_nothing_else_does():
    tensors = [PlanTensor(f"t{i}", (1 << 18,)) for i in range(40)]  # 1 MiB each

    def buckets(method, mib_a_second, backend="gloo"):
        def all_reduce(size):
            return size / 2**20 / mib_a_second

        return len(make_plan(method, tensors, range(40), (), backend, all_reduce=all_reduce).phases[0])

    # From four on there is one more, a small first one.
    assert [buckets(SSGD(), rate) for rate in (1e6, 1e3, 100, 10)] == [1, 3, 11, 40]
    assert buckets(Cast("bf16"), 100) == 8  # half the bytes: sqrt(2) fewer
    for method in (SSGD(fusion=4), SSGD(deterministic=True), SSGD(decoupled=True), TopK(0.01)):
        assert len({buckets(method, rate) for rate in (1e6, 10)}) == 1
    assert len({buckets(SSGD(), rate, "nccl") for rate in (1e6, 10)}) == 1


@given(
    tensors=st.lists(
        st.tuples(st.lists(st.sampled_from([1, 7, 300]), max_size=3), st.booleans(), st.sampled_from(KINDS)), min_size=1
    ),
    data=st.data(),
)
def test_the_engine_makes_the_same_plans(tensors, data):
    order = data.draw(st.permutations(range(len(tensors))))
    late = data.draw(st.sets(st.sampled_from(order)))
    fusion = data.draw(st.sampled_from(["auto", "none", "single", 0.01]))
    plain = [
        PlanTensor(f"t{i}", tuple(shape), dense, str(dtype), itemsize)
        for i, (shape, dense, (dtype, itemsize)) in enumerate(tensors)
    ]
    managed = [
        ManagedParameter(i, f"t{i}", torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")), dense)
        for i, (shape, dense, (dtype, _)) in enumerate(tensors)
    ]
    for method in (SSGD(fusion=fusion), ACP(fusion=fusion), TopK(0.1, fusion=fusion)):
        for backend in ("gloo", "nccl"):
            plan = make_plan(method, plain, order, late, backend)
            assert plan == engine_plan(method, managed, order, late, backend)
            plan.check(t.name for t in plain)


def test_a_prediction_follows_the_rule_as_the_engine_does_once_it_has_measured():
    """OMGS-SGD merges between one group and one per layer; LAGS-SGD sends as much as the link can hide."""
    profile, topology = builtin("resnet50"), Topology(16)
    slow, fast = (Costs.of_link(bits, 30e-6, 16) for bits in (1e9, 1e10))

    def predicted(method, costs=slow):
        return simulate(method, profile, topology, costs)

    merged = predicted(named("omgs", density=0.001))
    assert 1 < sum(not b.dense for b in merged.plan.phases[0]) < len(profile.tensors)
    for other in ("single", "none"):
        assert merged.step_seconds < predicted(TopK(0.001, fusion=other)).step_seconds
    kept = [sum(b.kept for b in predicted(named("lags"), costs).plan.phases[0]) for costs in (slow, fast)]
    assert 0 < kept[0] < kept[1]
    assert predicted(named("lags")).bytes_sent < predicted(named("lags"), fast).bytes_sent
    counts = [b.kept for b in explain(named("lags"), profile, topology, fast) if not b.dense]
    assert sum(filter(None, counts)) == kept[1]


def test_lags_shares_messages_among_layers_where_start_ups_cost_more_than_they_hide():
    profile, topology, costs = builtin("resnet50"), Topology(16), Costs.of_link(1e9, 4e-4, 16)
    steps = [simulate(named("lags", fusion=rule), profile, topology, costs) for rule in ("auto", "none")]
    merged, alone = (sum(not b.dense for b in step.plan.phases[0]) for step in steps)
    assert 1 < merged < alone == sum(len(t.shape) > 1 for t in profile.tensors)
    assert steps[0].step_seconds < steps[1].step_seconds


def test_a_decoupled_plan_begins_and_ends_with_a_small_bucket():
    tensors = [PlanTensor(f"t{i}", (1 << 17,)) for i in range(20)]  # half a MiB each
    plan = make_plan(SSGD(decoupled=True), tensors, range(20), (), "gloo")
    sizes = [len(bucket.names) for bucket in plan.buckets()]
    assert sizes == [1, 2, 8, 8, 1]
    assert [name for bucket in plan.buckets() for name in bucket.names] == [t.name for t in tensors]
    assert [len(b.names) for b in make_plan(SSGD(4, decoupled=True), tensors, range(20), (), "gloo").buckets()] == [
        8,
        8,
        4,
    ]
