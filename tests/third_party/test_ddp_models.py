"""Models that the DDP tests of torch's c10d suites train, written anew: gradients are exactly the means of both ranks'.

Branches that all, some or no ranks take, outputs that no loss uses, several backwards of one forward, and recomputed
layers that are used again or share a weight.
"""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import thinwire as tw
from spawned import run

pytestmark = pytest.mark.dist

STEPS = 5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.left, self.right, self.last = (nn.Linear(5, 5) for _ in range(4))
        self.tied = nn.Linear(5, 5)
        self.tied.weight = self.first.weight
        self.never = nn.Linear(5, 5)


def _branches(takes):
    """Layers that a rank takes in a step: ``takes(step, rank)``."""

    def losses(net, x, step, rank):
        x = torch.tanh(net.first(x))
        for layer in takes(step, rank):
            x = torch.tanh(getattr(net, layer)(x))
        yield net.last(x).square().mean()

    return losses


def _ignored(nested):
    def losses(net, x, step, rank):
        x = net.first(x)
        out = {"used": [net.left(x)], "not": {"used": (net.right(x), net.last(x))}} if nested else (net.left(x), x)
        yield (out["used"][0] if nested else out[0]).square().mean()

    return losses


def _several(net, x, step, rank):
    one, two = net.left(net.first(x)), net.right(torch.tanh(x))
    yield one.square().mean()
    yield two.square().mean()


def _recomputed(twice, shared):
    def losses(net, x, step, rank):
        def part(x):
            x = torch.tanh(net.left(torch.tanh(net.first(x))))
            return torch.tanh(net.tied(x)) if shared else x

        x = checkpoint(part, x, use_reentrant=False)
        if twice:
            x = checkpoint(part, x, use_reentrant=False)
        yield net.last(x).square().mean()

    return losses


KINDS = {
    "same branch": _branches(lambda step, rank: ["left"] if step % 2 else ["right"]),
    "other branch on each rank": _branches(lambda step, rank: ["left"] if (step + rank) % 2 else ["right"]),
    "branch on one rank, then on none": _branches(lambda step, rank: ["left"] * (step % 3 == rank)),
    "branch twice on one rank": _branches(lambda step, rank: ["left"] * (1 + rank)),
    "order of layers": _branches(lambda step, rank: ["left", "right"] if (step + rank) % 2 else ["right", "left"]),
    "an output ignored": _ignored(False),
    "outputs ignored in a nest": _ignored(True),
    "two backwards": _several,
    "recomputed": _recomputed(False, False),
    "recomputed twice": _recomputed(True, False),
    "recomputed with a shared weight": _recomputed(False, True),
    "recomputed twice with a shared weight": _recomputed(True, True),
}


def _input(step, rank):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(2 * step + rank))


def _joint(losses):
    """{step: [the mean over both ranks; None where no rank has a gradient]}, and the weights after the last step."""
    net, found = Net(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    for step in range(STEPS):
        ranks = []
        for rank in range(2):
            optimizer.zero_grad()
            for loss in losses(net, _input(step, rank), step, rank):
                loss.backward()
            ranks.append([p.grad for p in net.parameters()])
        means = [
            None if a is None and b is None else (0 if a is None else a / 2) + (0 if b is None else b / 2)
            for a, b in zip(*ranks)
        ]
        for p, mean in zip(net.parameters(), means):
            p.grad = mean
        optimizer.step()
        found.append(means)
    return found, list(net.parameters())


def _same(a, b):
    return (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))


def _train(rank, size):
    wrong = []
    for kind, losses in KINDS.items():
        means, weights = _joint(losses)
        for options in ({}, {"find_unused_parameters": True, "gradient_as_bucket_view": False}):
            net = Net()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
            with tw.attach(net, optimizer, "ssgd", bucket_cap_mb=0.0002, timeout=30, **options):
                for step in range(STEPS):
                    optimizer.zero_grad()
                    for loss in losses(net, _input(step, rank), step, rank):
                        loss.backward()
                    for (name, p), mean in zip(net.named_parameters(), means[step]):
                        if not _same(p.grad, mean):
                            wrong.append(f"{kind}, {options}, step {step}: {name}")
                    optimizer.step()
            if not all(map(torch.equal, net.parameters(), weights)):
                wrong.append(f"{kind}, {options}: weights")
    return wrong


def test_gradients_are_the_means():
    assert run(_train, 2) == [[], []]
