"""Does it train? Against S-SGD on an ill-conditioned regression and a small CNN; without feedback it must be worse."""

import functools

import pytest
import torch
from torch import nn
from worlds import label

from thinwire import GTopK, OkTopk
from thinwire.core.methods.acp import ACP
from thinwire.core.methods.cast import Cast
from thinwire.core.methods.powersgd import PowerSGD
from thinwire.core.methods.qsgd import QSGD
from thinwire.core.methods.sign import SignSGD
from thinwire.core.methods.ssgd import SSGD
from thinwire.core.methods.terngrad import TernGrad
from thinwire.core.methods.topk import TopK
from thinwire.core.program import LocalWorld

METHODS = [
    Cast(),
    Cast("fp16"),
    Cast("int8"),
    ACP(rank=4),
    PowerSGD(rank=4),
    SignSGD(),
    SignSGD(levels=2),
    pytest.param(QSGD(), marks=pytest.mark.slow),
    TernGrad(),
    TopK(0.1),
    GTopK(0.1),
    OkTopk(0.1),
]


@functools.cache
def regression(method, seed, steps=500, ranks=2):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(80, 40, generator=draw) * torch.logspace(0, -1, 40)
    y = x @ torch.randn(40, 30, generator=draw) + 0.5 * torch.randn(80, 30, generator=draw)
    world, w = LocalWorld(ranks), torch.zeros(40, 30)
    for step in range(steps):
        rate = 0.2 if step < 0.7 * steps else 0.02
        gradients = [{"w": 2 * a.T @ (a @ w - b) / len(a)} for a, b in zip(x.chunk(ranks), y.chunk(ranks))]
        w = w - rate * world.step(method, gradients)[0]["w"]
    return (x @ w - y).square().mean().item()


@functools.cache
def cnn(method, seed, steps=120, ranks=2):
    torch.manual_seed(seed)
    x = torch.randn(64, 1, 8, 8)
    y = (x[:, 0, :4].mean((1, 2)) > x[:, 0, 4:].mean((1, 2))).long() + 2 * (x[:, 0, 2, 2] > 0).long()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, 4),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8)
    world, total = LocalWorld(ranks, plan=[[name for name, _ in model.named_parameters()]]), 0.0
    for step in range(steps):
        gradients, losses = [], []
        for part, target in zip(x.chunk(ranks), y.chunk(ranks)):
            model.zero_grad()
            loss = nn.functional.cross_entropy(model(part), target)
            loss.backward()
            losses.append(loss.item())
            gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        for name, value in world.step(method, gradients)[0].items():
            model.get_parameter(name).grad = value
        optimizer.step()
        total += sum(losses) / ranks if step >= steps - 20 else 0.0
    return total / 20


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2))])
@pytest.mark.parametrize("method", METHODS, ids=label)
def test_regression_ends_where_ssgd_ends(method, seed):
    assert regression(method, seed) <= 1.05 * regression(SSGD(), seed)


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2))])
@pytest.mark.parametrize("kept", [ACP(rank=4), TopK(0.02)], ids=label)
def test_without_feedback_it_is_worse(kept, seed):
    dropped = type(kept)(**{**kept.options(), "error_feedback": False})
    assert regression(dropped, seed) > 1.01 * regression(kept, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("method", METHODS, ids=label)
def test_a_small_cnn_learns_the_task(method, seed):
    start = torch.log(torch.tensor(4.0)).item()
    dense = cnn(SSGD(), seed)
    assert cnn(method, seed) <= 1.05 * dense + 0.01 * start
    assert dense < 0.5 * start
