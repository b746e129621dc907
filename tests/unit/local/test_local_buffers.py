"""Buffers that come along with a round, of several ranks in one process."""

import torch

from thinwire.core.program import Topology
from thinwire.core.program.local_world import run_lockstep
from thinwire.engine.local.travel import Averages


def _round(ranks, meanwhile=lambda tensors: None):
    """What each rank has after a round; ``meanwhile`` changes it while the round travels."""
    averages = [Averages() for _ in ranks]
    run_lockstep([one.send(tensors) for one, tensors in zip(averages, ranks)], Topology(len(ranks)))
    for one, tensors in zip(averages, ranks):
        meanwhile(tensors)
        one.merge()


def test_the_mean_is_of_the_ranks_where_a_tensor_is_finite():
    """A mask has infinities on all; one rank's statistics were spoilt by one batch."""
    mask = torch.full((2, 2), -torch.inf).triu(1)
    ranks = [[mask.clone(), torch.full((3,), float(rank)), torch.full((), float(rank))] for rank in range(4)]
    ranks[3][1][1] = torch.nan
    _round(ranks)
    for kept, statistics, scalar in ranks:
        assert torch.equal(kept, mask)
        assert torch.equal(statistics, torch.ones(3))
        assert scalar == 1.5


def test_what_is_finite_nowhere_stays_each_ranks_own():
    ranks = [[torch.full((2,), torch.nan), torch.tensor([float(rank)])] for rank in range(2)]
    _round(ranks)
    assert all(spoilt.isnan().all() and mean == 0.5 for spoilt, mean in ranks)


def test_what_is_counted_while_it_travels_stays():
    ranks = [[torch.tensor(10 + rank), torch.tensor([rank == 0])] for rank in range(2)]
    _round(ranks, meanwhile=lambda tensors: tensors[0].add_(3))
    assert [int(count) for count, _ in ranks] == [13, 13]
    assert all(mark for _, mark in ranks)
