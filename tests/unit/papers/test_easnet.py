"""EASNet: what a cut can save at the published size, and the three verdicts."""

import pytest

from thinwire.systems.papers import easnet


def test_published_cuts_save_little_without_an_elastic_refinement():
    found = {one.key: one.value for one in easnet.simulated()}
    assert found["as published"] == pytest.approx(1.24, abs=0.02)
    assert found["elastic refinement"] > 3


def test_sizes_are_in_the_space_and_alone_they_are_the_same():
    for sub_net in easnet.SIZES.values():
        easnet.SPACE.check(sub_net)
        assert easnet.only(sub_net).largest == easnet.only(sub_net).smallest == sub_net


@pytest.mark.parametrize("smallest, middle, word", [
    (1.01, 0.98, "holds"), (1.2, 1.0, "holds where"), (1.2, 1.1, "does not hold:"),
])  # fmt: skip
def test_verdict(smallest, middle, word):
    ratios = {"smallest ratio": smallest, "middle ratio": middle, "largest ratio": 1.0}
    times = {"smallest time": 0.1, "middle time": 0.45, "largest time": 1.0}
    told, why = easnet.judge(ratios | times)
    assert told == word
    assert f"{smallest:.2f}" in why
    assert easnet.judge(ratios | {"smallest time": 0.9, "middle time": 0.95})[0] == "does not hold:"
