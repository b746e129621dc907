"""OMGS-SGD: what its authors' constants give, and the verdict."""

import pytest

from thinwire.systems.papers.omgs import judge, simulated


def test_by_the_authors_constants_the_optimum_gains_a_fifth_and_the_published_rule_nothing():
    found = {one.key: one for one in simulated()}
    assert found["greedy rule"].value == pytest.approx(1.0)
    assert found["optimum"].value == pytest.approx(1.203, rel=0.01)
    assert found["most"].value == pytest.approx(1.43, rel=0.05)
    assert "64 workers" in found["most"].what
    assert 0.95 < found["least"].value < 1.02  # where one group or a group per layer is best already


MEASURED = "better of one group and per layer measured"


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({}, "holds where"),
        ({"optimum": 1.3}, "holds"),
        ({MEASURED: 1.0}, "does not hold:"),
        ({"loss": 1.2}, "does not hold:"),
    ],
)
def test_the_verdict_follows_from_the_figures(changed, word):
    found = {"greedy rule": 1.0, "optimum": 1.2, "most": 1.5, MEASURED: 1.1, "loss": 1.01}
    assert judge(found | changed)[0] == word
