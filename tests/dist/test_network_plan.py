"""The plan of plain averages after the first step: by the rate of the network, the same on all ranks."""

import pytest
import torch

import thinwire as tw
from spawned import run

pytestmark = pytest.mark.dist


def _train(rank, size, seconds):
    from thinwire.engine import second_plan

    real = second_plan.all_reduce_rate
    if seconds is not None:
        second_plan.all_reduce_rate = lambda lane, device: lambda total: seconds
    try:
        return _steps(rank)
    finally:
        second_plan.all_reduce_rate = real


def _steps(rank):
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(300, 300, bias=False) for _ in range(10)))  # 3.4 MiB
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    counts = []
    with tw.attach(net, optimizer) as sync:
        for step in range(3):
            optimizer.zero_grad()
            net(torch.full((2, 300), float(rank + step))).square().mean().backward()
            counts.append(len(sync.plan.phases[0]))
            optimizer.step()
        plan = sync.plan.hash
    return counts, plan, [p.detach().sum().item() for p in net.parameters()]


@pytest.mark.parametrize(("seconds", "buckets"), [(0.0, 1), (0.1, 5)])
def test_the_network_s_rate_says_how_many_buckets(seconds, buckets):
    ranks = run(_train, 2, seconds)
    assert [counts[-1] for counts, *_ in ranks] == [buckets] * 2
    assert ranks[0] == ranks[1]


def test_ranks_measure_and_agree():
    ranks = run(_train, 3, None)
    assert ranks[0] == ranks[1] == ranks[2]
