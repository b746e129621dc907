"""Plans: fusion and placement against brute force, transports, what does not fit."""

import itertools
import math
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfac_with import ruled
from thinwire.core.pricing.costs import Costs, Linear, Table
from thinwire.core.pricing.merge import greedy_mgwfbp
from thinwire.core.pricing.placement import place, place_threshold
from thinwire.core.pricing.profiles import builtin
from thinwire.core.program import Scope
from thinwire.systems.kfac import KFACPlan, make_plan
from thinwire.systems.kfac.assignment import by_cost, end_seconds, fused, optimal, up_to
from thinwire.systems.kfac.plan import TRANSPORTS, FactorLayer
from thinwire.systems.kfac.predict import predict
from thinwire.systems.kfac.prices import LayerTimes, inversion_cost, layers_of
from thinwire.systems.kfac.published import dkfac, kaisa, named, spd

LAYERS = tuple(FactorLayer(str(i), a, g) for i, (a, g) in enumerate([(28, 16), (145, 32), (33, 64), (65, 10)]))


def linear(startup, rate, members=4, **compute):
    curves = {"memory": Linear(0, 1e-10), "multiply": Linear(0, 1e-11), **compute}
    exchanges = {(kind, "world", members): Linear(startup, rate) for kind in ("AllReduce", "Broadcast", "AllGather")}
    return Costs(exchanges, curves)


def times(steps):
    order = tuple(range(len(steps)))
    return LayerTimes(tuple(steps), tuple(steps), (0.0,) * len(steps), (0.0,) * len(steps), order, order[::-1])


def made(layers, costs, times, fusion):
    return make_plan(layers, 4, costs, times, maker=lambda plan, *known: fused(plan, [fusion], *known))


def finish(groups, sizes, steps, cost):
    link = clock = 0.0
    for group in groups:
        clock += sum(steps[i] for i in group)
        link = max(link, clock) + cost(sum(sizes[i] for i in group))
    return link


def all_groupings(n):
    for cuts in itertools.product([False, True], repeat=n - 1):
        groups = [[0]]
        for i, cut in enumerate(cuts, 1):
            if cut:
                groups.append([])
            groups[-1].append(i)
        yield groups


@given(
    st.lists(st.tuples(st.integers(1, 60), st.floats(0, 1e-3)), min_size=1, max_size=9),
    st.floats(0, 1e-3),
    st.floats(1e-9, 1e-6),
)
@settings(max_examples=60, deadline=None)
def test_fusion_is_the_optimum_of_all_groupings(layers, startup, rate):
    shapes = [FactorLayer(str(i), d, d) for i, (d, _) in enumerate(layers)]
    steps = [s for _, s in layers]
    costs, known = linear(startup, rate), times(steps)
    sizes = [layer.packed(0) for layer in shapes]
    cost = lambda n: startup + rate * 4 * n  # noqa: E731
    best = min(finish(groups, sizes, steps, cost) for groups in all_groupings(len(layers)))
    exact = made(shapes, costs, known, optimal).a_buckets
    assert finish(exact, sizes, steps, cost) == pytest.approx(best, rel=1e-12)
    published = make_plan(shapes, 4, costs, known, maker=spd).a_buckets
    assert finish(published, sizes, steps, cost) >= best * (1 - 1e-12)
    assert published == tuple(map(tuple, greedy_mgwfbp(sizes, steps, cost).groups))
    ends = {}
    plans = {limit: made(shapes, costs, known, up_to(limit)) for limit in (0, 1000, math.inf)}
    plans |= {maker: make_plan(shapes, 4, costs, known, maker=maker) for maker in (by_cost, spd)}
    for name, plan in plans.items():
        assert [i for bucket in plan.a_buckets for i in bucket] == list(range(len(layers)))  # all once, in order
        assert [i for bucket in plan.g_buckets for i in bucket] == list(range(len(layers)))[::-1]
        ends[name] = end_seconds(plan, costs, known)
    assert ends[by_cost] <= min(ends[0], ends[math.inf])


def test_fusion_at_the_extremes():
    steps = times([1e-3] * 4)
    free = made(LAYERS, linear(0.0, 1e-9), steps, optimal).a_buckets
    sizes = [layer.packed(0) for layer in LAYERS]
    cost = lambda n: 4e-9 * n  # noqa: E731
    assert finish(free, sizes, [1e-3] * 4, cost) == finish([[0], [1], [2], [3]], sizes, [1e-3] * 4, cost)
    dear = make_plan(LAYERS, 4, linear(10.0, 1e-9), steps)
    assert (len(dear.a_buckets), len(dear.g_buckets)) == (1, 1)
    mixed = [FactorLayer("a", 4, 4), FactorLayer("b", 4, 4, 8), FactorLayer("c", 4, 4, 8)]
    for schedule in ("dkfac", "spd-published", "spd", "kaisa:1"):
        plan = make_plan(mixed, 4, linear(10.0, 1e-9), maker=named(schedule))
        assert plan.a_buckets == ((0,), (1, 2)), schedule


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 3), st.integers(0, 60))
@settings(max_examples=80, deadline=None)
def test_placement_by_threshold_against_brute_force(dims, workers, threshold):
    found = place_threshold(dims, workers, threshold)
    sent = [i for i, d in enumerate(dims) if d >= threshold]
    assert [i for i, owner in enumerate(found.owner) if owner >= 0] == sent
    everywhere = sum(d for d in dims if d < threshold)
    best = min(
        max(sum(dims[i] for i, w in zip(sent, choice) if w == worker) for worker in range(workers))
        for choice in itertools.product(range(workers), repeat=len(sent))
    )
    assert found.makespan - everywhere <= best * (4 / 3 - 1 / (3 * workers)) + 1e-9
    assert found == place_threshold(dims, workers, threshold)
    with pytest.raises(ValueError, match="threshold"):
        place_threshold(dims, workers, -1)


def test_what_is_cheaper_to_invert_is_inverted_by_all():
    inverse = Table(((1, 1e-6), (1000, 1e-3)))  # about a microsecond for each of a side
    for sending, all_ in ((1e9, True), (0.0, False)):
        plan = make_plan(LAYERS, 4, linear(sending, 0.0, inverse=inverse))
        assert all((owner < 0) == all_ for owner in plan.owners)
    costs = linear(60e-6, 0.0, inverse=inverse)
    plan = make_plan(LAYERS, 4, costs)
    sent = {plan.dim(i) for i, owner in enumerate(plan.owners) if owner >= 0}
    kept = {plan.dim(i) for i, owner in enumerate(plan.owners) if owner < 0}
    assert sent == set() or max(kept, default=0) < min(sent)
    for threshold, transport in itertools.product((0, 64, 1000), TRANSPORTS):
        other = make_plan(LAYERS, 4, costs, maker=partial(ruled, threshold=threshold, transport=transport))
        assert sum(inversion_cost(costs, plan)) <= sum(inversion_cost(costs, other)) + 1e-12


@pytest.mark.parametrize("schedule", ["mpd", "spd", "kaisa:1/2", "kaisa:1/4", "dp", "dkfac"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_inverse_is_sent_once(schedule, transport):
    rules = {"schedule": schedule, "transport": transport, "threshold": 33 if schedule == "spd" else None}
    plan = make_plan(LAYERS, 4, linear(1e-5, 1e-9), maker=partial(ruled, **rules))
    sent = sorted(i for group in range(4 // plan.workers) for message in plan.messages(group) for i in message.items)
    owned = [i for i, owner in enumerate(plan.owners) if owner >= 0]
    assert sent == (owned if plan.workers > 1 else [])
    for group in range(4 // plan.workers):
        for message in plan.messages(group):
            owners = {plan.owners[i] for i in message.items}
            assert message.owner is None or owners == {message.owner}
            assert all(owner // plan.workers == group for owner in owners)
    returned = sorted(i for _, layers in plan.returns() for i in layers)
    assert returned == (list(range(4)) if plan.workers < 4 else [])
    for layer in range(4):
        assert sum(plan.mine(layer, rank) for rank in range(4)) == plan.workers
    assert KFACPlan.from_json(plan.to_json()) == plan
    assert KFACPlan.from_json(plan.to_json()).hash == plan.hash
    plan.check(LAYERS, 4, schedule=schedule)


# --- predictions -----------------------------------------------------------------------------------------------------


def test_predictions_are_sums_that_can_be_checked():
    profile, costs = builtin("resnet50"), Costs.of_link(10e9, 50e-6, 4)
    layers = layers_of(profile)
    known = LayerTimes.of_profile(profile, layers)
    compute = profile.forward_seconds + sum(profile.backward_seconds)
    found = {}
    for schedule in ("dkfac", "mpd", "spd", "dp"):
        plan = make_plan(layers, 4, costs, known, maker=named(schedule))
        found[schedule] = p = predict(plan, profile, costs)
        assert p.passes_seconds == pytest.approx(compute)
        statistics = sum(known.a_factor) + sum(known.g_factor)
        assert p.factor_compute_seconds == pytest.approx(statistics / (4 if schedule == "dp" else 1))
        total = sum(plan.elements(i) - 1 + 1 for i in range(108)) * 4 * 2 * 3 / 4
        assert p.factor_bytes == (0 if schedule == "dp" else pytest.approx(total, rel=1e-6))
        assert p.step_seconds(10, 100) < p.step_seconds()
        sent = costs.seconds("Broadcast", Scope.WORLD, 4, 4 * 25_503_912)  # the layers' weights, in four messages
        assert p.return_seconds == (pytest.approx(sent, rel=0.02) if schedule == "dp" else 0)
    assert found["spd"].factor_wait_seconds < found["dkfac"].factor_wait_seconds
    assert (
        found["spd"].invert_seconds + found["spd"].send_seconds
        <= found["mpd"].invert_seconds + found["mpd"].send_seconds
    )
    assert (found["dp"].send_seconds, found["dp"].factor_wait_seconds) == (0, 0)
    alone = predict(make_plan(layers, 1, Costs({})), profile, costs)
    assert alone.factor_wait_seconds == alone.send_seconds == alone.factor_bytes == 0
    assert alone.gradient_seconds == pytest.approx(0, abs=1e-12)


def test_times_of_a_profile_add_up():
    profile = builtin("resnet50")
    layers = layers_of(profile)
    known = LayerTimes.of_profile(profile, layers)
    assert sorted(known.a_order) == sorted(known.g_order) == list(range(54))
    assert sum(known.a_steps) - sum(known.a_factor) <= profile.forward_seconds
    assert sum(known.g_steps) - sum(known.g_factor) <= sum(profile.backward_seconds)
    assert known.a_order[0] == 0
    assert known.g_order[0] == 53


# --- what does not fit ----------------------------------------------------------------------------------------------


def test_fractions_and_plans_that_do_not_fit():
    with pytest.raises(ValueError, match="kaisa:1/6, kaisa:2/6, kaisa:3/6, kaisa:1"):
        make_plan(LAYERS, 6, linear(1e-5, 1e-9, 6), maker=kaisa("0.25"))
    for half in ("0.5", "1/2"):
        assert make_plan(LAYERS, 6, linear(1e-5, 1e-9, 6), maker=kaisa(half)).workers == 3
    with pytest.raises(LookupError, match="hold no exchange"):
        make_plan(LAYERS, 4, Costs({}))
    plan = make_plan(LAYERS, 4, Costs({}), maker=dkfac)  # asks for no price
    with pytest.raises(ValueError, match=r"world_size: 4 in the plan, 2 here; method: 'inverse' in the plan, 'eigen'"):
        plan.check(LAYERS, 2, method="eigen")
    with pytest.raises(ValueError, match="layers"):
        plan.check(LAYERS[:3], 4)
    for text in ("{}", "[]", plan.to_json().replace("owners", "hosts"), "nothing"):
        with pytest.raises(ValueError, match="not a K-FAC plan"):
            KFACPlan.from_json(text)


def test_equal_costs_place_alike():
    assert place([1.0] * 6, 3).owner == (0, 1, 2, 0, 1, 2)


@pytest.mark.parametrize("model, layers, a, g", [("resnet50", 54, 62.35, 14.62), ("resnet152", 156, 161.96, 32.93)])
def test_factors_of_the_published_models(model, layers, a, g):
    """Millions of elements of all triangles, as their paper counts them."""
    found = layers_of(builtin(model))
    assert len(found) == layers
    assert sum(x.d_a * (x.d_a + 1) // 2 for x in found) / 1e6 == pytest.approx(a, abs=0.005)
    assert sum(x.d_g * (x.d_g + 1) // 2 for x in found) / 1e6 == pytest.approx(g, abs=0.005)
