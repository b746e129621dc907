"""The plan of plain averages after the first step: by the rate of the network, the same on all ranks."""

import pytest
import torch

import thinwire as tw
from spawned import run

pytestmark = pytest.mark.dist
BYTES = 10 * 300 * 300 * 4


def _train(rank, size, seconds, backward=None):
    from thinwire.engine.controller import planning
    from thinwire.engine.ranks import communicator

    typical, gain = communicator.typical, planning.gain_of_overlap
    if seconds is not None:
        communicator.typical = lambda totals, ranks: (BYTES, seconds)
    if backward is not None:
        planning.gain_of_overlap = lambda all_reduce, measured: gain(all_reduce, backward)
    try:
        return _steps(rank)
    finally:
        communicator.typical, planning.gain_of_overlap = typical, gain


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
        issued = dict(sync.stats().collectives)
    assert issued == {"AllReduce": sum([1, *counts[:-1]])}  # nothing but the gradients' own
    return counts, plan, [p.detach().sum().item() for p in net.parameters()]


@pytest.mark.parametrize(("seconds", "backward", "buckets"), [(0.0, 1.0, 1), (0.1, 1.0, 6), (1.0, 0.1, 6)])
def test_the_network_s_rate_and_the_backward_say_how_many_buckets(seconds, backward, buckets):
    ranks = run(_train, 2, seconds, backward)
    assert [counts[-1] for counts, *_ in ranks] == [buckets] * 2
    assert ranks[0] == ranks[1]


def test_a_short_backward_hides_little_of_a_slow_exchange():
    ranks = run(_train, 2, 1e3)  # backward as measured: milliseconds
    assert ranks[0][0][-1] < 6
    assert ranks[0] == ranks[1]


def test_ranks_measure_and_agree():
    ranks = run(_train, 3, None)
    assert ranks[0] == ranks[1] == ranks[2]
