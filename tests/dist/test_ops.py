"""Every op of the language through the engine's own thread equals LocalWorld, bit for bit."""

from dataclasses import dataclass
from typing import ClassVar

import cases
import pytest
import torch

import thinwire as tw
from spawned import run
from thinwire.core.collectives.exchange import LanePool, issue
from thinwire.core.program import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Exchange,
    LocalWorld,
    Method,
    ReduceScatter,
    Scope,
    Topology,
)

pytestmark = pytest.mark.dist


@dataclass(frozen=True)
class Everything(Method):
    """Each op once, several rounds of Exchange; the result depends on all of them."""

    name: ClassVar[str] = "everything"
    fusion: str = "none"

    def reduce(self, bucket, state):
        x, size, rank = bucket.gradient(), state.size, state.rank
        rows = torch.stack([x * (r + 1) for r in range(size)])
        shard = yield ReduceScatter(rows.reshape(-1).clone())
        everyone = yield AllGather(shard)
        mail = yield AllToAll(rows.clone())
        total = mail.sum(0) + everyone.reshape(size, -1)[0]
        for round_ in range(3):
            peer = rank ^ 1 if (rank ^ 1) < size and round_ != 1 else None
            other = yield Exchange(total.clone(), peer=peer)
            total = torch.minimum(total, other) + round_
        first = yield Broadcast(total.clone(), source=size - 1)
        bucket.write_gradient(total + first)


def _engine(rank, size, steps):
    net = cases.model()
    sync = tw.attach(net, torch.optim.SGD(net.parameters(), lr=0.0), Everything(), detect_desync=True)
    found = []
    for step in range(steps):
        net.zero_grad()
        cases.loss_of(net, rank, step).backward()
        found.append({n: p.grad.clone() for n, p in net.named_parameters()})
    sync.close()
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_op_equals_local_world(size):
    steps = 3
    results = run(_engine, size, steps)
    world, net = LocalWorld(size), cases.model()
    for step in range(steps):
        gradients = []
        for rank in range(size):
            net.zero_grad()
            cases.loss_of(net, rank, step).backward()
            gradients.append({n: p.grad.clone() for n, p in net.named_parameters()})
        wanted = world.step(Everything(), gradients)
        for rank in range(size):
            assert all(torch.equal(results[rank][step][n], wanted[rank][n]) for n in wanted[rank])


def _of_two(rank, size, dtypes):
    lane = LanePool(tuple(range(size)), Topology(size), rank, None).get("test", Scope.WORLD, 0, bidirectional=True)
    found = []
    for n, dtype in dtypes:
        x = torch.randn(n, generator=torch.Generator().manual_seed(rank)).mul(50).to(dtype)
        everyone = x.new_zeros(size, n)
        gathering = [issue(AllGather(x.clone(), out=everyone), lane, 0), issue(AllGather(x), lane, 1)]
        found.append([issue(AllReduce(x.clone()), lane, 2).wait(), *(p.wait() for p in gathering)])
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_large_sums_and_gathers_of_two_ranks_swap(size):
    dtypes = [(n, t) for n in (5, 70_001) for t in (torch.float32, torch.bfloat16, torch.float64, torch.int32)]
    results = run(_of_two, size, dtypes)
    for i, (n, dtype) in enumerate(dtypes):
        given = [torch.randn(n, generator=torch.Generator().manual_seed(r)).mul(50).to(dtype) for r in range(size)]
        sums, into, new = zip(*(result[i] for result in results))
        assert all(torch.equal(total, sums[0]) for total in sums)
        if size == 2:
            assert torch.equal(sums[0], given[0] + given[1])
        assert all(torch.equal(rows, torch.stack(given)) for rows in (*into, *new))
