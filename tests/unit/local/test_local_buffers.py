"""What comes along with a round beside weights, of several ranks in one process."""

import logging

import pytest
import torch
from torch import nn

from thinwire.core.program import Topology
from thinwire.core.program.local_world import run_lockstep
from thinwire.engine.local.settings import Local
from thinwire.engine.local.travel import Averages, BuffersAndFrozen
from thinwire.engine.parameters import buffers_of, frozen_of


def _round(ranks, meanwhile=lambda tensors: None, mean=True):
    """What each rank has after a round; ``meanwhile`` changes it while the round travels."""
    averages = [Averages() for _ in ranks]
    sent = [one.send((x, mean) for x in tensors) for one, tensors in zip(averages, ranks)]
    run_lockstep(sent, Topology(len(ranks)))
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


def test_what_is_no_statistic_becomes_rank_0s_which_keeps_its_own():
    """Keys of a queue: their mean would be the key of nothing; what rank 0 has put in since stays there."""
    ranks = [[torch.full((3,), float(rank)), torch.tensor(5 + rank)] for rank in range(3)]
    late = iter((7.0, 8.0, 9.0))
    _round(ranks, meanwhile=lambda tensors: tensors[0][:1].fill_(next(late)), mean=False)
    assert [queue.tolist() for queue, _ in ranks] == [[7.0, 0.0, 0.0], [0.0] * 3, [0.0] * 3]
    assert all(int(at) == 5 for _, at in ranks)


class Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.target = nn.BatchNorm1d(2), nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("queue", torch.zeros(2))
        self.register_buffer("ema", torch.zeros(2))


def _beside(model, rows, averaged=()):
    """``rows``: what other ranks see, added to this one's message."""
    return BuffersAndFrozen(
        buffers_of(model), frozen_of(model, ["norm.weight", "norm.bias"]), lambda mine: [mine, *rows], averaged
    )


def test_running_statistics_and_named_buffers_become_the_mean_and_others_are_told(caplog):
    model = Kept()
    beside = _beside(model, [], averaged=["ema"])
    model.queue.add_(1)
    with caplog.at_level(logging.WARNING, "thinwire"):
        for _ in range(3):
            beside.leave([])
    means = {id(x): mean for x, mean in beside.left()}
    buffers = dict(model.named_buffers())
    assert {name: means[id(x)] for name, x in buffers.items() if x.is_floating_point()} == {
        "norm.running_mean": True, "norm.running_var": True, "queue": False, "ema": True,
    }  # fmt: skip
    assert caplog.text.count("here queue; if the mean") == 1


def test_a_name_that_no_round_carries_is_refused():
    for name in ("emma", "norm.num_batches_tracked", "norm.weight"):
        with pytest.raises(ValueError, match=f"average_buffers: rounds carry no floating-point buffer '{name}'"):
            _beside(Kept(), [], averaged=[name])
    with pytest.raises(ValueError, match="average_buffers='ema' must be a list of names"):
        Local(4, average_buffers="ema")


def test_a_frozen_weight_travels_as_long_as_a_script_changes_it(caplog):
    """One that was moved once, by a rounding, rests again; a target that begins late is found."""
    model, named = Kept(), {"target.weight", "target.bias"}
    beside, moves = _beside(model, []), {3, 20, *range(40, 60)}
    seen = []
    with caplog.at_level(logging.WARNING, "thinwire"):
        for round_ in range(80):
            if round_ in moves:
                model.target.weight.data.mul_(1 + 1e-6)
            beside.look(round_)
            beside.leave([])
            seen.append("target.weight" in beside.names)
            assert beside.names <= named - {"target.bias"}
    assert [r for r in range(80) if seen[r]] == [*range(8, 16), *range(24, 32), *range(40, 72)]
    assert caplog.text.count("target.weight and 0 more, 16 bytes") == 1


def test_what_another_rank_has_seen_to_move_travels_here_too():
    beside = _beside(Kept(), [b"\0\1"])
    beside.look()
    assert beside.names == {"target.bias"}
