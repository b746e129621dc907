"""EASNet: what a cut can save at the published size, and the three verdicts."""

import pytest

from thinwire.systems.papers import easnet


@pytest.mark.slow
def test_published_cuts_save_little_without_an_elastic_refinement():
    found = {one.key: one.value for one in easnet.simulated()}
    assert found["as published"] == pytest.approx(1.24, abs=0.02)
    assert found["elastic refinement"] > 3


def test_sizes_are_in_the_space_and_alone_they_are_the_same():
    for sub_net in easnet.SIZES.values():
        easnet.SPACE.check(sub_net)
        assert easnet.only(sub_net).largest == easnet.only(sub_net).smallest == sub_net


@pytest.mark.parametrize("middle, as_published, word", [
    (0.98, 2.5, "holds"), (1.02, 1.24, "holds where"), (1.1, 1.24, "does not hold:"),
])  # fmt: skip
def test_verdict(middle, as_published, word):
    found = {"as published": as_published, "block matching": 1.66, "smallest time": 0.6, "middle time": 0.45}
    found |= {"smallest ratio": 1.2, "middle ratio": middle, "smallest real": 1.0, "middle real": 3.0}
    told, why = easnet.judge(found)
    assert told == word
    assert f"the middle network has {middle:.2f} times the error of the same trained alone, in 0.45 of the" in why
    assert "block matching is better than the middle" in why
    assert easnet.judge(found | {"middle time": 0.95})[0] == "does not hold:"
