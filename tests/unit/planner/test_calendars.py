"""Calendars of a period against every way there is to give its steps runs of layers."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.core.pricing.periods import calendar, exposed, layers

TIMES = st.lists(st.integers(0, 12), min_size=1, max_size=7)
ROOM = st.lists(st.integers(0, 20), min_size=1, max_size=4)


def every_assignment(count, every):
    """All ways to cut layers into runs for the steps, in order; a run may be empty."""
    for ends in itertools.combinations_with_replacement(range(count + 1), every - 1):
        bounds = [0, *ends, count]
        yield [list(range(a, b)) for a, b in itertools.pairwise(bounds)]


def squares(steps, exchanges):
    return sum(sum(exchanges[layer] for layer in some) ** 2 for some in steps)


@settings(max_examples=150, deadline=None)
@given(TIMES, ROOM)
def test_no_assignment_exposes_less_nor_loads_steps_more_evenly(exchanges, windows):
    ways = list(every_assignment(len(exchanges), len(windows)))
    least = min((exposed(way, exchanges, windows), squares(way, exchanges)) for way in ways)
    found = calendar(exchanges, windows)
    assert found in ways
    assert (exposed(found, exchanges, windows), squares(found, exchanges)) == least


@settings(max_examples=150, deadline=None)
@given(TIMES, ROOM, st.integers(1, 4))
def test_what_leaves_again_fits_and_nothing_more_does(exchanges, windows, apart):
    every, first = len(windows), calendar(exchanges, windows)
    found = calendar(exchanges, windows, apart=apart)
    assert all(set(once) <= set(some) and len(set(some)) == len(some) for once, some in zip(first, found))
    assert exposed(found, exchanges, windows) == exposed(first, exchanges, windows)

    def distances(layer, step):
        others = [other for other, some in enumerate(found) if layer in some and other != step]
        return [min((step - other) % every, (other - step) % every) for other in others]

    for step, some in enumerate(found):
        assert all(distance >= apart for layer in some for distance in distances(layer, step))
        room = windows[step] - sum(exchanges[layer] for layer in some)
        for layer in set(range(len(exchanges))) - set(some):
            assert exchanges[layer] > room or room <= 0 or min(distances(layer, step)) < apart


def test_who_has_waited_longest_leaves_again_half_way():
    found = calendar([9, 9, 9, 9], [9, 9, 9, 18], apart=1)
    assert found == [[0], [1], [2], [3, 1]]


@pytest.mark.parametrize("every", [2, 4, 8, 64])
def test_fragments_are_whole_modules_in_their_order(every):
    names = [f"block.{i}.{part}.{kind}" for i in range(12) for part in ("norm", "up", "down") for kind in ("w", "b")]
    sizes = [{"norm": 8, "up": 4096, "down": 4096}[name.split(".")[2]] if name.endswith("w") else 8 for name in names]
    runs = layers(names, sizes, every)
    assert [place for run in runs for place in run] == list(range(len(names)))
    modules = [{names[place].rpartition(".")[0] for place in run} for run in runs]
    assert sum(map(len, modules)) == len(set().union(*modules)) == 36
    assert len(runs) == min(36, 4 * every)


def test_a_model_without_modules_is_cut_by_parameters():
    assert layers(["a", "b", "c"], [3, 3, 3], 4) == [range(0, 1), range(1, 2), range(2, 3)]
