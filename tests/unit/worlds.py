"""Small helpers of the method tests: fixed matrices, seeded gradients, the conservation law."""

import torch

from thinwire import OMGS, DeAR, GTopK, OkTopk, OneBit
from thinwire.core.methods.acp import ACP
from thinwire.core.methods.cast import Cast
from thinwire.core.methods.dgc import DGC
from thinwire.core.methods.hitopk import HiTopK
from thinwire.core.methods.lags import LAGS
from thinwire.core.methods.powersgd import PowerSGD
from thinwire.core.methods.qsgd import QSGD
from thinwire.core.methods.sign import SignSGD
from thinwire.core.methods.ssgd import SSGD
from thinwire.core.methods.terngrad import TernGrad
from thinwire.core.methods.topk import TopK

FEEDBACK = [
    ACP(rank=2, min_rate=1.0),
    ACP(rank=3, compress="matrices", deterministic=True),
    PowerSGD(rank=2, min_rate=1.0),
    SignSGD(),
    SignSGD(levels=2),
    Cast("int8", block=16),
    TopK(0.1),
    TopK(0.05, value_dtype="fp16"),
    TopK(0.3, value_dtype="bf16"),
    TopK(0.1, exchange="auto"),
    GTopK(0.1),
    OkTopk(0.1),
    OkTopk(0.2, value_dtype="fp16", capacity=1.0),
    HiTopK(0.1),
    OMGS(0.1),
    LAGS(20),
]
MOMENTUM = [DGC(0.1), DGC(1.0, nesterov=True)]
UNBIASED = [QSGD(), QSGD(bits=2, norm="l2"), TernGrad()]
DECOUPLED = [DeAR(), Cast(decoupled=True), ACP(rank=2, min_rate=1.0, decoupled=True)]
EVERY = [SSGD(), SSGD(deterministic=True), Cast(), Cast("fp16"), *DECOUPLED, OneBit(), *UNBIASED, *MOMENTUM, *FEEDBACK]
SHAPES = {"w": (12, 9), "b": (5,), "conv": (6, 4, 2, 2), "s": (), "empty": (0, 3), "row": (1, 8), "column": (8, 1)}
PLAN = [["w", "b", "empty"], ["conv", "s"], ["row", "column"]]


def label(method):
    default = type(method)(0.5) if isinstance(method, (TopK, HiTopK)) else type(method)()
    changed = [f"{k}={v}" for k, v in method.options().items() if default.options()[k] != v]
    return "-".join([method.name, *changed])


def draw(seed, shapes=SHAPES, ranks=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    one = lambda shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    return [{name: one(shape) for name, shape in shapes.items()} for _ in range(ranks)]


def mean(dicts):
    return {name: sum(d[name] for d in dicts) / len(dicts) for name in dicts[0]}


def decaying(n=40, m=30, rank=4, g=0.9, seed=0):
    """A matrix with singular values (2, 1.6, 1.3, 1, g, g 0.9, ...) and its best approximation of that rank."""
    generator = torch.Generator().manual_seed(seed)
    k = min(n, m)
    u = torch.linalg.qr(torch.randn(n, k, generator=generator, dtype=torch.float64)).Q
    v = torch.linalg.qr(torch.randn(m, k, generator=generator, dtype=torch.float64)).Q
    s = torch.tensor([2, 1.6, 1.3, 1.0] + [g * 0.9**j for j in range(k - 4)], dtype=torch.float64)
    return (u * s) @ v.mT, (u[:, :rank] * s[:rank]) @ v[:, :rank].mT
