"""LAGS-SGD: its step beside Top-k's, delta of its assumption, and the verdict."""

import pytest
import torch

from thinwire.core.program import LocalWorld
from thinwire.systems.papers.lags import DELTA, MADE, PAPER, ROWS, deltas
from thinwire.systems.papers.workbench import Replicas


def test_selection_beside_backward_and_short_start_ups_make_it_faster_than_top_k():
    found = {one.key: one.value for one in PAPER.simulated()}
    assert found["S-SGD, start-up 50 us, selection in backward"] == pytest.approx(5.2, rel=0.05)
    assert found["one group, start-up 50 us, selection in backward"] == pytest.approx(1.14, rel=0.05)
    assert found["one group, start-up 50 us, selection beside backward"] == pytest.approx(1.74, rel=0.05)
    assert found["one group, start-up 436 us, selection in backward"] < 1  # a message a layer


def test_delta_of_equal_gradients_is_what_top_k_leaves_over_what_chance_leaves():
    gradient = {"w": torch.arange(1.0, 201.0).view(10, 20)}
    world = LocalWorld(2)
    world.step(DELTA, [gradient, gradient])
    squares = torch.arange(1.0, 201.0).square()
    expected = squares[:-2].sum() / squares.sum() / (1 - 2 / 200)
    assert list(deltas(Replicas(None, world, [gradient] * 2), [{}] * 2)) == [pytest.approx(float(expected))]


@pytest.mark.parametrize(
    ("inside", "beside", "delta", "word"),
    [(1.3, 1.5, 0.9, "holds"), (1.1, 1.5, 0.9, "holds where"), (1.3, 1.5, 1.2, "does not hold:")],
)
def test_the_verdict_follows_from_the_figures(inside, beside, delta, word):
    found = {f"{label} measured": 1.2 for label in ROWS} | {"delta": delta}
    for label in MADE:
        for start, where, gain in ((50, "in", inside), (50, "beside", beside), (436, "in", 0.8)):
            found[f"{label}, start-up {start} us, selection {where} backward"] = gain
    assert PAPER.judge(found)[0] == word
