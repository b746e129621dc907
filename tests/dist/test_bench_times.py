"""A step's time is that of the last rank's end, not the sum of what each rank waited."""

import pytest
import torch

from spawned import run
from thinwire.tools.bench.round_robin import of_all_ranks

pytestmark = pytest.mark.dist


def _alternating(rank, size):
    """Two ranks that wait for one another in turns, as on a long wire, after a step that is not timed."""
    own = [[0.5 + rank, 1.0]] + [[0.09, 1.0 + rank] if (step + rank) % 2 else [0.03, 0.5] for step in range(6)]
    return of_all_ranks(torch.tensor(own, dtype=torch.float64), 1)


def test_ranks_that_wait_in_turns_do_not_count_twice():
    first, second = run(_alternating, 2)
    assert torch.equal(first, second)
    assert first[0].tolist() == [1.5, 1.0]
    assert first[1:, 0].tolist() == pytest.approx([0.09, 0.03, 0.09, 0.03, 0.09, 0.03])
    assert float(first[1:, 0].sum()) == pytest.approx(0.36)  # not 6 x 0.09
    assert first[1:, 1].max() == 2.0


def _periods(rank, size):
    """Rank 1 is faster in the first period of two steps and slower in the second."""
    own = [[0.2, 0.0]] * 2 + [[0.4, 0.0]] * 2 if rank else [[0.3, 0.0]] * 2 + [[0.2, 0.0]] * 2
    return of_all_ranks(torch.tensor(own, dtype=torch.float64), 0, 2)


def test_steps_of_a_period_count_as_its_mean():
    (found, _) = run(_periods, 2)
    assert found[:, 0].tolist() == pytest.approx([0.3, 0.3, 0.3, 0.3])
    assert found[2, 0] == found[3, 0]
