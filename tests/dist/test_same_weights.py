"""Weights that all ranks have already do not travel at attach; what differs anywhere becomes rank 0's."""

import pytest
import torch
from torch import nn

import thinwire as tw
from spawned import run
from thinwire.engine.ranks import agreement

pytestmark = pytest.mark.dist
WIDE = 1500  # a layer of 9 MB: two make a chunk


def _net(seed=7):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(4)), nn.BatchNorm1d(WIDE))


def _attach(rank, size, other):
    net = _net()
    if rank == other:
        with torch.no_grad():
            net[3].weight[5, 6] += 1  # in the second chunk
    sent, plain = [], agreement.broadcast_chunk

    def counted(chunk, lane, source):
        sent.append(sum(x.nbytes for x in chunk))
        plain(chunk, lane, source)

    agreement.broadcast_chunk = counted
    with tw.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), "ssgd"):
        agreement.broadcast_chunk = plain
        mine = [x.clone() for x in net.state_dict().values()]
    wanted = _net()
    if other == 0:
        with torch.no_grad():
            wanted[3].weight[5, 6] += 1
    return sum(sent), all(torch.equal(a, b) for a, b in zip(mine, wanted.state_dict().values()))


@pytest.mark.parametrize("other", [None, 0, 2])
def test_only_what_differs_is_sent(other):
    layer = 4 * (WIDE * WIDE + WIDE)
    for sent, right in run(_attach, 3, other):
        assert right
        if other is None:
            assert sent == 0
        else:
            assert layer <= sent < 3 * layer
