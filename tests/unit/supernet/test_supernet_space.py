import collections
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.systems.supernet import Space, SubNet
from thinwire.systems.supernet.space import round8
from thinwire.systems.supernet.stereo import Phase, published, short


@given(st.integers(0, 2**32))
def test_samples_are_in_the_space_and_survive_json(seed):
    space = Space()
    net = space.sample(random.Random(seed))
    space.check(net)
    assert SubNet.from_json(net.to_json()) == net
    assert SubNet.from_json(net.to_json()).hash == net.hash


@given(st.floats(1, 2000))
def test_round8_is_the_nearest_multiple_unless_that_loses_a_tenth(width):
    n = round8(width)
    assert n % 8 == 0
    assert n >= max(8, 0.9 * width)
    assert n <= max(8, width + 8)


def test_every_value_is_drawn_equally_often():
    space, seen = Space(), collections.defaultdict(collections.Counter)
    phase = Phase("all", space, 1, 1.0)
    for step in range(3000):
        net = phase.draw(0, step, 0)
        seen["scales"][net.scales] += 1
        seen["depth"][net.depths[1]] += 1
        seen["kernel"][net.stages[1][1][0]] += 1
        seen["expand"][net.stages[0][0][1]] += 1
    bounds = {3: 18.42, 4: 21.11}  # chi-square at 1e-4 with 2 and with 3 degrees of freedom
    for counts in seen.values():
        expected = 3000 / len(counts)
        assert sum((n - expected) ** 2 / expected for n in counts.values()) < bounds[len(counts)]
    assert {len(counts) for counts in seen.values()} == {3, 4}


def test_draws_follow_from_seed_phase_step_and_number_alone():
    phase = Phase("p", Space(), 10, 1.0, sub_nets=2)
    one = [phase.draw(3, step, j) for step in range(5) for j in range(2)]
    assert one == [phase.draw(3, step, j) for step in range(5) for j in range(2)]
    assert len(set(one)) == len(one)
    others = {Phase("q", Space(), 10, 1.0).draw(3, 0, 0), phase.draw(4, 0, 0), phase.draw(3, 1, 0)}
    assert one[0] not in others


def test_phases_keep_their_constraints():
    for phase in published(10):
        for step in range(20):
            phase.space.check(net := phase.draw(0, step, 0))
            Space().check(net)
    large = published(10)[0]
    assert {large.draw(0, step, 0) for step in range(10)} == {Space().largest}
    assert [phase.sub_nets for phase in published(1)] == [1, 1, 2, 4, 6]
    assert [phase.steps for phase in published(10)] == [640, 270, 270, 270, 270]


def test_rates():
    kernel = published(100)[1]
    assert kernel.rate(0) == kernel.rate(199) == 5e-4
    assert kernel.rate(200 + 1250) == pytest.approx(2.5e-4)
    assert kernel.rate(2700) == pytest.approx(0, abs=1e-12)
    kitti = Phase("kitti", Space(), 400, 1e-4, halve=100)
    assert [kitti.rate(step) for step in (0, 99, 100, 399)] == [1e-4, 1e-4, 5e-5, 1.25e-5]
    assert short(Space(), 10, 20)[1].sort


def test_counts_of_the_nominal_space():
    stage = 12**2 + 12**3 + 12**4
    assert Space().count() == stage**2 + stage**3 + stage**4
    extended = Space(refine_widths=(16, 32), refine_depths=(2, 4, 6))
    assert extended.count() == 6 * Space().count()
