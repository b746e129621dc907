"""Buckets by size: crumbs go with what follows, the first bucket is small, overlap is worth no more than backward."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.core.pricing.plans import by_size, gain_of_overlap, needed_soon, started_early

SIZES = st.lists(st.sampled_from([0, 1, 3, 40, 64, 100, 250]), max_size=40)


def flat(groups):
    return [i for group in groups for i in group]


def test_a_bias_goes_with_its_weight():
    layers = [1, 64] * 4  # the bias arrives just before the weight, long after the layer above
    assert by_size(layers, 64) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert by_size([64, 1] * 3, 64) == [[0], [1, 2], [3, 4, 5]]  # whatever the order; the last one joins
    assert by_size([30, 30, 1, 64], 64) == [[0, 1], [2, 3]]  # 61 of 64 are taken: the crumb is not waited for


def test_edges():
    assert by_size([], 4) == []
    assert by_size([1, 1, 1], 0) == [[0], [1], [2]]
    assert by_size([1, 2, 3], float("inf")) == [[0, 1, 2]]
    assert by_size([9], 4) == [[0]]
    assert by_size([4, 4, 4, 4], 8, first=4) == [[0], [1, 2], [3]]
    with pytest.raises(ValueError, match="negative"):
        by_size([1], -1)


@given(sizes=SIZES, limit=st.sampled_from([0, 1, 64, 100, 1000, float("inf")]))
def test_every_tensor_has_one_bucket_in_order(sizes, limit):
    for groups in (by_size(sizes, limit), needed_soon(sizes, limit)):
        assert flat(groups) == list(range(len(sizes)))
        assert all(groups)
        early = started_early(groups, sizes, limit)
        assert flat(early) == list(range(len(sizes)))
        assert all(early)


@given(sizes=SIZES, limit=st.sampled_from([64, 100, 1000]))
def test_no_bucket_is_a_crumb_and_only_crumbs_exceed_the_limit(sizes, limit):
    groups = by_size(sizes, limit)
    for group in groups:
        total = sum(sizes[i] for i in group)
        assert len(groups) == 1 or total >= limit / 16
        assert total - max(sizes[i] for i in group) < limit  # one tensor, however large, and what fits beside it
        large = [i for i in group if sizes[i] >= limit / 16]
        assert len(large) < 2 or sum(sizes[i] for i in large) <= limit


def test_the_link_has_work_early():
    sizes = [8, 1, 1, 48, 64, 64, 64]
    groups = by_size(sizes, 64)
    assert groups == [[0, 1, 2, 3], [4], [5], [6]]
    assert started_early(groups, sizes, 64) == [[0], [1, 2, 3], [4], [5], [6]]
    assert started_early(groups[:3], sizes, 64) == groups[:3]  # few buckets: the network is fast


def test_overlap_gains_no_more_than_backward_lasts():
    gain = gain_of_overlap(lambda size: size / 100, 2.0)
    assert (gain(100), gain(200), gain(10_000)) == (1.0, 2.0, 2.0)
