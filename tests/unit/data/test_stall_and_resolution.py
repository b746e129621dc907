"""Resolution schedules; the stall split."""

import doctest

import pytest
import torch

from thinwire.systems.data import ResolutionSchedule, Stage, resolution, stall


def test_dawnbench_schedule():
    schedule = ResolutionSchedule.dawnbench()
    assert schedule.epochs == 28
    assert schedule.changes == (13, 24, 27)
    sizes = [schedule.at(epoch).size for epoch in range(28)]
    assert [sizes.count(size) for size in (96, 128, 224, 288)] == [13, 11, 3, 1]
    assert sizes == sorted(sizes)
    assert [schedule.at(epoch).batch for epoch in range(28)] == [32768] * 27 + [16384]
    again = ResolutionSchedule.from_json(schedule.to_json())
    assert again == schedule
    assert hash(again) == hash(schedule)
    for epoch in (-1, 28):
        with pytest.raises(ValueError, match="28 epochs"):
            schedule.at(epoch)
    with pytest.raises(ValueError, match="at least one"):
        ResolutionSchedule([])
    with pytest.raises(ValueError, match="size=0"):
        Stage(1, 0, 1)


@pytest.mark.parametrize("text", ["{", "3", '["x"]', '[{"epochs": 1}]', '[{"epochs": 1, "size": 0, "batch": 1}]'])
def test_what_is_no_schedule_is_one_sentence(text):
    with pytest.raises(ValueError, match="this is not a resolution schedule: "):
        ResolutionSchedule.from_json(text)


def test_examples_in_docstrings():
    result = doctest.testmod(resolution)
    assert result.attempted > 0
    assert result.failed == 0


def test_stall_split_counts_and_adds_up():
    seen = []
    loaders = {"real": [1, 2, 3], "synthetic": [4, 5]}
    split = stall.measure(loaders, lambda batch: seen.append(torch.ones(8) * batch))
    assert len(seen) == 5
    assert [split[name].batches for name in loaders] == [3, 2]
    for row in split.values():
        assert row.wait_seconds > 0
        assert row.step_seconds > 0
        assert row.seconds == row.wait_seconds + row.step_seconds
