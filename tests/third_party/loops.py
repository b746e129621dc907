"""What the loops of this folder share: the ways to average gradients, real text, and what a run leaves behind."""

import argparse
import inspect
import math
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw

LOSSY = [
    ("acp", {"start_compression_step": 0}),
    ("powersgd", {}),
    ("topk", {"density": 0.05, "start_compression_step": 0}),
    ("cast", {"dtype": "int8"}),  # compresses from its first step anyway
]
WAYS = ["attach", pytest.param("hook", marks=pytest.mark.slow)]


class Wire:
    """A model whose gradients are averaged: by DDP alone, by DDP with our hook, or by ``attach``."""

    def __init__(self, way, model, optimizer=None, method="ssgd", **options):
        self.way, self.raw, self.net = way, model, model
        if way == "attach":
            self.ours = tw.attach(model, optimizer, method, **options)
            self.no_sync = self.ours.no_sync
            return
        self.net = DistributedDataParallel(model)
        self.no_sync = self.net.no_sync
        if way == "hook":
            self.ours, hook = tw.ddp_hook(method, **options)
            self.net.register_comm_hook(self.ours, hook)

    def sync_if(self, last):
        """All but the last of several passes stay on this rank."""
        return nullcontext() if last else self.no_sync()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.way in ("attach", "hook"):
            self.ours.close()


@dataclass
class Trail:
    """One run as one rank saw it."""

    losses: list = field(default_factory=list)
    weights: list = field(default_factory=list)  # all of the model's, in one vector, after every step
    evaluated: dict = field(default_factory=dict)
    stats: list = field(default_factory=list)  # thinwire's, of each model
    buffers: list = field(default_factory=list)

    def step(self, loss, *models):
        self.losses.append(float(loss.detach()))
        self.weights.append(torch.cat([p.detach().flatten() for m in models for p in m.parameters()]))


def both(train, way):
    """Under S-SGD and then under the methods that lose something."""
    found = {"ssgd": train(way, "ssgd")}
    for method, options in LOSSY:
        found[f"{method} {options}"] = train(way, method, **options)
    return found


def assert_trains(results, *, falls, near, count=6):
    """Per method: ranks stay equal, the loss falls, and it ends near that of S-SGD.

    Args:
        results: of ``both``, one for each rank.
        falls: by how much at least, from the mean of the first ``count`` steps to that of the last.
        near: how far the latter may be from that of S-SGD.
    """
    ends = {}
    for name in results[0]:
        assert_ranks_equal([result[name] for result in results])
        losses = [sum(r[name].losses[i] for r in results) / len(results) for i in range(len(results[0][name].losses))]
        ends[name] = sum(losses[:count]) / count, sum(losses[-count:]) / count
    for first, last in ends.values():
        assert last < first - falls, ends
        assert abs(last - ends["ssgd"][1]) < near, ends


def assert_equal(ours, theirs):
    """Losses and weights of every step, bit for bit.

    No rounding to allow for: all divide by the ranks before the sum, and a sum of two numbers has one order.
    """
    assert ours.losses == theirs.losses
    assert len(ours.weights) == len(theirs.weights) > 0
    for step, (a, b) in enumerate(zip(ours.weights, theirs.weights)):
        assert torch.equal(a, b), (step, float((a - b).abs().max()))


def assert_ranks_equal(trails):
    """The weights are the same on all ranks after every step, while each rank saw data of its own."""
    first, *others = trails
    for other in others:
        assert other.losses != first.losses
        for step, (a, b) in enumerate(zip(first.weights, other.weights)):
            assert torch.equal(a, b), (step, float((a - b).abs().max()))
    assert torch.isfinite(first.weights[-1]).all()


def text(least=60_000):
    """Real text of that length at least, as one tensor of character codes below 128."""
    whole = inspect.getsource(argparse) + inspect.getsource(inspect)
    assert len(whole) >= least
    return torch.tensor([min(ord(c), 127) for c in whole[:least]])


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before, self.between = nn.LayerNorm(width, bias=False), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.before(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        y = self.narrow(nn.functional.gelu(self.wide(self.between(x))))
        return x + nn.functional.dropout(y, self.dropout, self.training)


class GPT(nn.Module):
    """A few thousand parameters; the embedding is the last layer too, as in GPT-2."""

    def __init__(self, width=16, heads=2, length=32, dropout=0.0):
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads, dropout)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 128, bias=False)
        self.head.weight = self.tokens.weight
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.5 / math.sqrt(width))

    def forward(self, x, y=None):
        h = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))
        return logits, None if y is None else cross_entropy(logits.flatten(0, 1), y.flatten())
