"""LAGS-SGD: its step beside Top-k's, delta of its assumption, and the verdict."""

from itertools import product

import pytest
import torch

from thinwire.core.program import LocalWorld
from thinwire.systems.papers.lags import DELTA, MADE, ROWS, deltas, judge, simulated
from thinwire.systems.papers.workbench import Replicas


def test_selection_beside_backward_makes_it_faster_than_one_group_whatever_a_start_up_costs():
    found = {one.key: one.value for one in simulated()}
    assert found["S-SGD, start-up 50 us, selection in backward"] == pytest.approx(5.2, rel=0.05)
    assert found["one group, start-up 50 us, selection in backward"] == pytest.approx(1.14, rel=0.05)
    assert found["one group, start-up 50 us, selection beside backward"] == pytest.approx(1.74, rel=0.05)
    assert found["one group, start-up 436 us, selection beside backward"] == pytest.approx(1.62, rel=0.05)


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
        for start, where in product((50, 436), ("in", "beside")):
            found[f"{label}, start-up {start} us, selection {where} backward"] = inside if where == "in" else beside
    assert judge(found)[0] == word
