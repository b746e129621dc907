"""The search finds optima that brute force confirms; tables add up."""

import dataclasses
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from supernet_nets import tiny

from thinwire.core.program import Topology
from thinwire.core.program.local_world import run_lockstep
from thinwire.engine.executors.alone import run_alone
from thinwire.systems.supernet import Evolution, Infeasible, Space, SubNet, search
from thinwire.systems.supernet.search import crossed, mutated
from thinwire.systems.supernet.stereo import LatencyTable, build_table, measure_net

SMALL = Space(kernels=(3, 5), depths=(1, 2), expands=(2,), scales=(2,))


def everything(space):
    """All sub-networks."""
    blocks = list(itertools.product(space.kernels, space.expands))
    stages = [stage for depth in space.depths for stage in itertools.product(blocks, repeat=depth)]
    return [SubNet(tuple(chosen)) for s in space.scales for chosen in itertools.product(stages, repeat=s)]


def cost(net):
    return sum(k * k * e * (s + 1) for s, stage in enumerate(net.stages) for k, e in stage) / 10


def quality(net):
    """Without a pattern, but the same everywhere."""
    return random.Random(net.hash).random() + 0.02 * cost(net)


def find(space, limit, evolution=None, measured=cost, fitness=quality, **kw):
    evolution = evolution or Evolution(24, 30, mutate=0.3, seed=1)
    return run_alone(search(space, fitness, limit, cost, measured, evolution, **kw))


def test_the_small_space_has_as_many_as_counted():
    assert len(set(everything(SMALL))) == SMALL.count() == 36


@pytest.mark.parametrize("limit", [5.4, 8.0, 12.0, 99.0])
def test_the_optimum_of_a_small_space_is_found(limit):
    best = max((net for net in everything(SMALL) if cost(net) <= limit), key=quality)
    found = find(SMALL, limit)
    assert found.best.sub_net == best
    assert found.best.measured_ms == cost(best)
    assert all(c.predicted_ms <= limit for c in found.archive)


def test_below_the_smallest_it_is_infeasible_at_once():
    smallest = cost(SMALL.smallest)
    with pytest.raises(Infeasible, match=f"the smallest takes {smallest:.3g} ms") as caught:
        find(SMALL, smallest / 2, fitness=lambda net: 1 / 0)
    assert caught.value.smallest_ms == smallest
    assert find(SMALL, smallest).best.sub_net == SMALL.smallest


def test_the_answer_keeps_the_limit_as_measured():
    slow = lambda net: cost(net) * 1.5  # noqa: E731
    found = find(SMALL, 12.0, measured=slow)
    assert found.best.measured_ms <= 12.0
    assert any(c.measured_ms > 12.0 for c in found.candidates)
    kept = [c for c in found.candidates if c.measured_ms <= 12.0]
    assert found.best.fitness == max(c.fitness for c in kept)
    with pytest.raises(Infeasible, match="the smallest takes"):
        find(SMALL, 12.0, measured=lambda net: 100.0)


def test_any_number_of_ranks_finds_the_same():
    size, wanted = 3, find(SMALL, 9.0, Evolution(10, 6))
    found, scored = [None] * size, [[] for _ in range(size)]

    def rank(r):
        def fitness(net):
            scored[r].append(net)
            return quality(net)

        measured = cost if r == 0 else lambda net: 1 / 0  # only rank 0 measures
        found[r] = yield from search(SMALL, fitness, 9.0, cost, measured, Evolution(10, 6), rank=r, world=size)

    run_lockstep([rank(r) for r in range(size)], Topology(size))
    assert all(result == wanted for result in found)
    together = [net for nets in scored for net in nets]
    assert len(together) == len(set(together)) == len(wanted.archive)
    assert max(map(len, scored)) < len(together)


@given(st.integers(0, 2**20))
@settings(max_examples=60, deadline=None)
def test_children_are_in_the_space(seed):
    rng, space = random.Random(seed), Space(refine_widths=(16, 32), refine_depths=(2, 6))
    a, b = space.sample(rng), space.sample(rng)
    space.check(mutated(space, a, rng, 0.3))
    child = crossed(a, b, rng)
    space.check(child)
    for s, stage in enumerate(child.stages):
        for place, (k, e) in enumerate(stage):
            having = [n.stages[s][place] for n in (a, b) if s < n.scales and place < len(n.stages[s])]
            assert k in {x for x, _ in having}
            assert e in {x for _, x in having}
    assert mutated(space, a, random.Random(0), 1e-12).stages[: a.scales][0] == a.stages[0]


def test_pareto_front():
    found = find(SMALL, 99.0)
    front = found.pareto()
    assert len(front) > 1
    for c in found.archive:
        assert any(f.predicted_ms <= c.predicted_ms and f.fitness >= c.fitness for f in front)
    for a, b in itertools.pairwise(front):
        assert a.predicted_ms < b.predicted_ms
        assert a.fitness < b.fitness


@pytest.fixture(scope="module")
def table():
    return build_table(tiny(), (24, 48), repeats=2)


def test_a_table_has_every_part_and_adds_them_up(table):
    net = tiny()
    assert len(table.blocks) == 2 * 2 * 3 * 2
    sub_net = net.space.uniform(5, 2, 4, 2)
    parts = [table.blocks[f"{s}.{b}.5.4"].p50 for s in (0, 1) for b in (0, 1)]
    whole = sum(parts) + table.aggregation["2"].p50 + table.refinement["whole"].p50
    assert table.predict(sub_net) == pytest.approx(table.factor * whole)
    assert all(0 < t.p50 <= t.p90 for t in [*table.blocks.values(), *table.aggregation.values()])
    assert measure_net(net, sub_net, (24, 48), 2).p50 > 0


def test_a_table_survives_json_and_refuses_another_space(table):
    other = LatencyTable.from_json(table.to_json())
    assert other == table
    with pytest.raises(ValueError, match="another space"):
        other.predict(Space().largest)
    assert dataclasses.replace(table, factor=2 * table.factor).predict(tiny().space.smallest) == pytest.approx(
        2 * table.predict(tiny().space.smallest)
    )
