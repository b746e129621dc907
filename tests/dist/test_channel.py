"""A channel: rounds of programs on tensors that are not parameters, in the order of their numbers."""

import os
import signal

import pytest
import torch

import thinwire as tw
from spawned import run
from thinwire.core.program import CROSS, NODE, WORLD, AllReduce, Topology

pytestmark = pytest.mark.dist


def _sum(x, group, found, index):
    found[index] = (yield AllReduce(x, group)).clone()


def _rounds(rank, size):
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    results = []
    with tw.attach(net, optimizer) as sync:
        channel = sync.services.channel("test", {WORLD: 1, NODE: 1, CROSS: 1}, Topology(size, 2))
        for turn in range(3):
            found = {}
            groups = [WORLD, NODE, CROSS, WORLD]
            values = [torch.full((5,), float(10 * index + rank + turn)) for index in range(4)]
            channel.begin(
                [[str(i)] for i in range(4)],
                lambda i, values=values, groups=groups, found=found: _sum(values[i], groups[i], found, i),
            )
            with pytest.raises(RuntimeError, match="wait"):
                channel.begin([["again"]], lambda i, values=values: _sum(values[i], WORLD, {}, i))
            order = [(i + rank) % 4 for i in range(4)]  # ready in another order on each rank
            for index in order[:2]:
                channel.ready(index)
            net(torch.randn(4, 3)).square().mean().backward()  # gradients do not wait for it
            for index in order[2:]:
                channel.ready(index)
            assert channel.under_way
            channel.wait()
            assert not channel.under_way
            results.append([float(found[i][0]) for i in range(4)])
            optimizer.zero_grad()
        assert channel.ledger.issued["AllReduce"] == 12
        channel.begin([], lambda i: None)
        assert channel.wait() == 0.0
    return results


def test_rounds_are_summed_whatever_is_ready_first():
    for rank, results in enumerate(run(_rounds, 4)):
        for turn, (world, node, cross, last) in enumerate(results):
            base = [10.0 * i + turn for i in range(4)]
            pair = (0 + 1) if rank < 2 else (2 + 3)
            assert world == 4 * base[0] + 6
            assert node == 2 * base[1] + pair
            assert cross == 2 * base[2] + (rank % 2) + (rank % 2 + 2)
            assert last == 4 * base[3] + 6


def _failing(rank, size):
    net = torch.nn.Linear(3, 2)
    with tw.attach(net, torch.optim.SGD(net.parameters(), 0.1), timeout=6) as sync:
        channel = sync.services.channel("test", {WORLD: 1})
        if rank == 1:
            return "left"
        channel.begin([["factor x"]], lambda i: _sum(torch.ones(3), WORLD, {}, i))
        channel.ready(0)
        with pytest.raises(RuntimeError, match=r"bucket 0 \(factor x\)"):
            channel.wait()
        with pytest.raises(RuntimeError, match="unusable"):
            net(torch.ones(1, 3)).sum().backward()
    return "told"


def test_a_rank_that_leaves_is_told():
    assert run(_failing, 2, fresh=True) == ["told", "left"]


def test_alone():
    net = torch.nn.Linear(3, 2)
    with tw.attach(net, torch.optim.SGD(net.parameters(), 0.1)) as sync:
        channel, found = sync.services.channel("test", {WORLD: 1}), {}
        channel.begin([["x"]], lambda i: _sum(torch.ones(2), WORLD, found, i))
        channel.ready(0)
        assert channel.wait() >= 0
        assert found[0].tolist() == [1, 1]


def _dies_before_the_channel(rank, size):
    net = torch.nn.Linear(3, 2)
    sync = tw.attach(net, torch.optim.SGD(net.parameters(), 0.1), timeout=6)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as error:
        sync.services.channel("late", {WORLD: 2})
    sync.close()
    return str(error.value)


def test_who_does_not_come_to_a_channel_is_named():
    said, _ = run(_dies_before_the_channel, 2, expect_exit={1: -signal.SIGKILL})
    assert said.startswith("rank 0: connecting failed: ")
    assert "Rank 1 did not report: dead, late or done already (" in said
