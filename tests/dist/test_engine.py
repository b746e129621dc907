"""What a training loop may do to the engine: a second backward, recomputed layers, groups, two models."""

from unittest.mock import patch

import cases
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import thinwire as tw
from spawned import run
from thinwire.core.collectives.exchange import LanePool

pytestmark = pytest.mark.dist


def _loops(rank, size):
    """A second backward, an exchange of nothing, sub-programs, agreement, and what remains after ``close``."""
    found = {}
    net = cases.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sync = tw.attach(net, optimizer, "ssgd")
    cases.loss_of(net, rank, 1).backward()
    sent = sync.stats().bytes_sent
    sync.synchronize()  # nothing has been added since
    found["idle"] = sync.stats().bytes_sent - sent
    cases.loss_of(net, rank, 2).backward()  # as DDP: the average and one more
    found["twice"] = [p.grad.clone() for p in net.parameters()]
    found["agree"] = (sync.services.agree(rank == 1), sync.services.agree(False))

    def program():
        total = yield tw.program.AllReduce(torch.tensor([float(rank + 1)]))
        everyone = yield tw.program.AllGather(total)
        return everyone.flatten().tolist()

    found["run"] = sync.services.run(program())
    with pytest.raises(RuntimeError, match="call close"):
        tw.attach(net, optimizer, "ssgd")
    sync.close()
    sync.close()
    p = next(net.parameters())
    p.grad = None
    cases.loss_of(net, rank, 1).backward()
    found["detached"] = p.grad.clone()
    return found


def _gradient(rank, step):
    net = cases.model()
    cases.loss_of(net, rank, step).backward()
    return [p.grad for p in net.parameters()]


def test_loops():
    both = [_gradient(rank, step) for rank in range(2) for step in (1, 2)]
    for rank, found in enumerate(run(_loops, 2)):
        torch.testing.assert_close(found["twice"], [sum(some) / 2 for some in zip(*both)])
        assert found["idle"] == 0
        assert found["agree"] == (True, False)
        assert found["run"] == [3.0, 3.0]
        assert torch.equal(found["detached"], _gradient(rank, 1)[0])


class Blocks(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.unused = nn.Linear(2, 2)
        self.reentrant = reentrant

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(checkpoint(block, x, use_reentrant=self.reentrant))
        return x.square().mean()


def _recompute(rank, size):
    worst = []
    for reentrant in (True, False):
        grads = {}
        for attached in (False, True):
            for other in range(size) if not attached else [rank]:
                net = Blocks(reentrant)
                optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
                sync = tw.attach(net, optimizer, "ssgd", fusion="none") if attached else None
                for step in range(2):
                    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(step * 7 + other)).requires_grad_()
                    net.zero_grad()
                    net(x).backward()
                grads.setdefault(attached, []).append([p.grad for p in net.blocks.parameters()])
                if sync:
                    assert sync.stats().steps == 2
                    sync.close()
        mean = [sum(parts) / size for parts in zip(*grads[False])]
        worst.append(max(float((a - b).abs().max()) for a, b in zip(mean, grads[True][0])))
    return worst


def test_activation_checkpointing_in_both_forms():
    for worst in run(_recompute, 2):
        assert max(worst) < 1e-6


def _subgroup(rank, size):
    import torch.distributed as dist

    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = groups[rank % 2]
    net = cases.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with tw.attach(net, optimizer, "acp", rank=2, process_group=mine) as sync:
        for step in range(2):
            net.zero_grad()
            cases.loss_of(net, rank, step).backward()
        return sync.stats().world_size, [p.grad.clone() for p in net.parameters()]


def test_sub_groups():
    results = run(_subgroup, 4)
    for a, b in ((0, 2), (1, 3)):
        assert results[a][0] == 2
        assert all(torch.equal(x, y) for x, y in zip(results[a][1], results[b][1]))
    assert not torch.equal(results[0][1][0], results[1][1][0])


def _two_in_one_backward(rank, size, method):
    """Two attached models whose exchanges overlap: their groups must not be made on the way, in threads."""
    nets = [nn.Sequential(*(nn.Linear(16, 16) for _ in range(6))) for _ in range(2)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    lanes, get = set(), LanePool.get

    def noting(held, *key, **how):
        lanes.add((id(held), *key))
        return get(held, *key, **how)

    with patch.object(LanePool, "get", noting):
        syncs = [tw.attach(n, o, method) for n, o in zip(nets, optimizers)]
        at_attach = set(lanes)
        for step in range(6):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank))
            sum(net(x).square().mean() for net in nets).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    weights = [p.detach() for net in nets for p in net.parameters()]
    for sync in syncs:
        sync.close()
    return len(at_attach), len(lanes - at_attach), weights


_FACTORS = {"rank": 2, "verify_every": 2, "min_rate": 1.0, "fusion": "none"}


@pytest.mark.parametrize(
    "method", [tw.ACP(**_FACTORS), tw.PowerSGD(**_FACTORS), tw.TopK(0.1), tw.Cast("int8")], ids=lambda m: m.name
)
def test_two_models_in_one_backward(method):
    ranks = run(_two_in_one_backward, 2, method)
    for at_attach, on_the_way, _ in ranks:
        assert at_attach >= 4
        assert on_the_way == 0
    for mine, others in zip(ranks[0][2], ranks[1][2]):
        assert torch.equal(mine, others)
