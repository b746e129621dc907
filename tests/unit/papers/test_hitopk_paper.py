"""HiTopK: its step beside the torus at the paper's scale, selections, and the verdict."""

import pytest

from thinwire.systems.papers.hitopk import CASES, judge, selection, simulated


def test_the_published_gain_appears_where_backward_does_not_hide_the_exchange():
    found = {one.key: one.value for one in simulated()}
    assert found["torus resnet50 128"] == pytest.approx(1.02, abs=0.02)
    assert found["torus resnet50 32"] == pytest.approx(1.56, rel=0.05)
    assert found["torus bert-base 64"] == pytest.approx(1.21, rel=0.05)
    assert found["torus bert-large 32"] == pytest.approx(1.66, rel=0.05)


def test_selections_are_compared_with_that_of_torch():
    assert selection(1 << 12).keys() == {"mstopk", "exact"}


@pytest.mark.parametrize(
    ("gains", "measured", "word"),
    [((1.3,) * 5, 1.4, "holds"), ((1.0, 1.5, 1.1, 1.2, 1.6), 1.4, "holds where"), ((1.3,) * 5, 0.9, "does not hold:")],
)
def test_the_verdict_follows_from_the_figures(gains, measured, word):
    found = {f"torus {model} {batch}": gain for (model, batch), gain in zip(CASES, gains)}
    assert judge(found | {"torus measured": measured, "torus loss": measured})[0] == word
