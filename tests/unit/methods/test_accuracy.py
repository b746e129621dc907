"""Does it train? Against S-SGD on an ill-conditioned regression and a small CNN; without feedback it must be worse."""

import functools

import pytest
import torch
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


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2))])
@pytest.mark.parametrize("method", METHODS, ids=label)
def test_regression_ends_where_ssgd_ends(method, seed):
    assert regression(method, seed) <= 1.05 * regression(SSGD(), seed)


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2))])
@pytest.mark.parametrize("kept", [ACP(rank=4), TopK(0.02)], ids=label)
def test_without_feedback_it_is_worse(kept, seed):
    dropped = type(kept)(**{**kept.options(), "error_feedback": False})
    assert regression(dropped, seed) > 1.01 * regression(kept, seed)
