"""Layers that leave by a calendar: what no schedule may change, and what a calendar says of each layer."""

import pytest
import torch
from local_ranks import SHAPES, Ranks, close, equal, mean_walk, virtual, walk

from thinwire.core.methods.acp import ACP
from thinwire.core.methods.cast import Cast
from thinwire.core.methods.topk import TopK
from thinwire.engine.local import QSR, Local
from thinwire.engine.local.settings import local_settings

ELEMENTS = [torch.Size(shape).numel() for shape in SHAPES.values()]  # each of them is a module, and a fragment
WINDOWS = [0, 60, 120, 1000]  # elements that travel in a step: no time left, for the small ones, for most, for all


def world_of(every, codec=None, *, window=None, ranks=2, dtype=torch.float64, **options):
    world = Ranks(Local(every, codec, schedule="dream", **options), equal(ranks, dtype=dtype))
    if window is not None:
        follow(world, window)
    return world


def follow(world, window):
    for rounds in world.rounds:
        rounds.follow(ELEMENTS, window, again=True)


def leaving(world):
    return [fragment.index for fragment in world.rounds[0].leaving()]


CODECS = [None, Cast("int2", block=16), ACP(rank=2, min_rate=1.0), TopK(0.1)]
PERIODS = [(2, "least"), (4, "least"), (5, 2), (4, "full")]


@pytest.mark.parametrize(
    ("codec", "every", "delay"), [(c, *PERIODS[(i + k) % 4]) for i, c in enumerate(CODECS) for k in (0, 2)], ids=str
)
def test_no_exchange_moves_the_virtual_iterate(codec, every, delay):
    """Nor does another calendar, which begins at a period's end while something travels."""
    world = world_of(every, codec, ranks=3, fragment_sync_delay=delay)
    plans = {number * every: window for number, window in enumerate((120, 0, 60, 1000), 1)}
    for step in range(5 * every + 3):
        if step in plans:
            follow(world, plans[step])
        walk(world, 1, first=step)
        close(virtual(world), mean_walk(3, step + 1))
    assert world.rounds[0].travelling()


@pytest.mark.parametrize("every", [2, 3, 4, 8])
@pytest.mark.parametrize("window", WINDOWS)
def test_every_layer_leaves_in_every_period_and_more_often_where_there_is_time(every, window):
    world = world_of(every, window=window)
    for _ in range(3):
        seen = []
        for _ in range(every):
            walk(world, 1)
            seen += leaving(world)
        assert set(seen) == set(range(len(SHAPES)))
        assert (len(seen) > len(SHAPES)) == (window > 0 and not (window == 60 and every == 2))
        if window == 1000:
            assert len(seen) == every * len(SHAPES)


def test_rounds_are_waited_for_until_a_calendar_follows_from_their_times():
    world = world_of(4)
    walk(world, 4)
    assert all(rounds.settings.measures(rounds.measured) and not rounds.travelling() for rounds in world.rounds)
    follow(world, 0)
    walk(world, 4, first=4)
    (gone,) = {fragment.left for fragment in world.rounds[0].travelling()}
    assert gone == 8
    assert {fragment.due for fragment in world.rounds[0].travelling()} == {9}


@pytest.mark.parametrize("window", [0, 120])
def test_a_change_that_is_not_finite_costs_its_layer_one_exchange(window):
    world = world_of(4, TopK(0.1), window=window)
    walk(world, 8)
    world.weights[1]["a"][2, 3] = torch.nan
    walk(world, 5, first=8)
    assert [fragment.rejected for fragment in world.rounds[0].fragments] == [1, 0, 0, 0, 0]
    assert all(x.isfinite().all() for own in world.weights for x in own.values())


def test_a_warm_up_averages_all_layers_after_every_step():
    world = world_of(4, warmup_steps=3, window=120)
    for step in range(3):
        walk(world, 1, first=step)
        assert leaving(world) == list(range(len(SHAPES)))
    walk(world, 1, first=3)
    assert leaving(world) == sorted(world.rounds[0].calendar[0])


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("delay", [1, 3])
def test_no_more_travel_at_a_time_than_was_said(window, delay):
    world = world_of(4, window=window, fragment_sync_delay=delay)
    for step in range(12):
        walk(world, 1, first=step)
        assert len({f.left for f in world.rounds[0].travelling()}) <= world.rounds[0].most_travelling() == delay


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"sync_every": "auto"}, "not sync_every='auto': use sync_every=8"),
        ({"sync_every": QSR(0.1)}, r"not sync_every=QSR\(.*\): use sync_every=8"),
        ({"sync_every": 1}, "at least 2, not sync_every=1"),
        ({"fragments": 4}, "leave out fragments="),
        ({"fragment_sync_delay": 0}, "fragment_sync_delay=0 waits for them: leave it out"),
        ({"fragment_sync_delay": 8}, "must be below sync_every=8"),
        ({"fragment_sync_delay": "auto"}, "works with a fixed period"),
        ({"moments": {"exp_avg": 3}}, "but moments need that: leave out one of them"),
        ({"schedule": "dreams"}, "schedule='dreams' is unknown; .*strided.*dream"),
    ],
)
def test_bad_settings(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        Local(**{"schedule": "dream", **options})


def test_what_is_not_named_follows_from_the_schedule():
    assert Local(8).fragment_sync_delay == 0
    assert Local(8, schedule="dream").fragment_sync_delay == 1
    assert local_settings("local", {"sync_every": 8, "schedule": "dream"}) == Local(8, Cast("int8"), schedule="dream")
    with pytest.raises(ValueError, match="not sync_every='auto'"):
        local_settings("local", {"schedule": "dream"})
