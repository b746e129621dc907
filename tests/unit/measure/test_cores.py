import json
import os

import pytest

from thinwire.predict.measure.machine import place, spare_cores, spare_places, usable_cores


def at(machine, *cores):
    return json.dumps([machine, list(cores)]).encode()


@pytest.mark.parametrize(
    ("places", "rank", "spare"),
    [
        ([at("a", 0, 1)], 0, True),
        ([at("a", 0)], 0, False),
        ([at("a", 0, 1), at("a", 0, 1)], 0, False),  # two ranks on two cores, wherever their addresses lie
        ([at("a", 0, 1), at("b", 0, 1)], 1, True),
        ([at("a", 0, 1), at("a", 2, 3)], 0, True),  # each tied to cores of its own
        ([at("a", 0), at("a", 1)], 1, False),
        ([at("a", *range(8)), at("a", *range(8)), at("a", *range(8)), at("a", *range(8))], 3, True),
        ([at("a", *range(8))] * 5, 3, False),
    ],
)
def test_ranks_that_share_cores_have_none_to_spare(places, rank, spare):
    assert spare_places(places, rank) is spare


def test_this_process_knows_its_place():
    assert spare_places([place()], 0) is spare_cores(1)
    assert spare_places([place()] * usable_cores(), 0) is False


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs affinities")
def test_the_affinity_counts():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert usable_cores() == 1
        assert not spare_places([place()], 0)
    finally:
        os.sched_setaffinity(0, before)
