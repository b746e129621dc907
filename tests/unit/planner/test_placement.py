"""Placement against every other placement of small cases."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.core.pricing.placement import Placement, place

COSTS = st.lists(st.integers(0, 40).map(float), max_size=8)


def best(costs, workers, sending=None):
    """The shortest makespan of all placements; with ``sending``, of those that do twice what ``place`` does twice."""
    twice = [sending is not None and c < s for c, s in zip(costs, sending or costs)]
    shared = [c for c, t in zip(costs, twice) if not t]
    ends = (
        max(sum(c for c, o in zip(shared, owners) if o == w) for w in range(workers))
        for owners in itertools.product(range(workers), repeat=len(shared))
    )
    return sum(c for c, t in zip(costs, twice) if t) + min(ends)


@given(COSTS.filter(lambda c: len(c) <= 7), st.integers(1, 3))
def test_longest_first_stays_within_its_bound(costs, workers):
    found = place(costs, workers)
    loads = [sum(costs[i] for i in found.items(worker)) for worker in range(workers)]
    assert sorted(i for worker in range(workers) for i in found.items(worker)) == list(range(len(costs)))
    assert found.makespan == max(loads)
    least = best(costs, workers)
    assert least <= found.makespan <= least * (4 / 3 - 1 / (3 * workers)) + 1e-9


@given(COSTS, st.integers(1, 3), st.data())
def test_only_what_is_cheaper_to_do_than_to_send_is_done_by_all(costs, workers, data):
    sending = data.draw(st.lists(st.integers(0, 40).map(float), min_size=len(costs), max_size=len(costs)))
    found = place(costs, workers, sending)
    assert [owner == -1 for owner in found.owner] == [c < s for c, s in zip(costs, sending)]
    rest = [c for c, owner in zip(costs, found.owner) if owner >= 0]
    assert [o for o in found.owner if o >= 0] == list(place(rest, workers).owner)
    twice = sum(c for c, owner in zip(costs, found.owner) if owner < 0)
    assert found.makespan == pytest.approx(twice + place(rest, workers).makespan)


def test_ends_of_the_range():
    assert place([3.0, 1.0, 2.0], 2, [0.0] * 3).owner == (0, 1, 1)  # sending is free: each has one owner
    assert place([3.0, 1.0, 2.0], 2, [1e9] * 3).owner == (-1, -1, -1)  # sending never pays
    assert place([3.0, 1.0, 2.0], 2, [1e9] * 3).makespan == 6.0
    assert place([2.0, 2.0], 2, [2.0, 2.0]).owner == (0, 1)  # at equal cost it is sent
    assert place([], 3) == Placement((), 0.0)
    assert place([7.0] * 4, 4).owner == (0, 1, 2, 3)  # ties: lower index, lower worker
