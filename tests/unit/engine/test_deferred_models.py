"""Decoupled against S-SGD in one process, bit for bit, on models whose layers are called in odd ways."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import thinwire as tw


class Attention(nn.Module):
    """``out_proj`` is read by ``MultiheadAttention`` without being called."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x, step):
        x = self.embed(x).unsqueeze(0)
        return self.head(self.attention(x, x, x)[0]).square().mean()


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x, step):
        return self.layer(self.embed(x).unsqueeze(0)).square().mean()


class Listed(nn.Module):
    """Parameters of a list that is never called, read by the module around it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.factors = nn.ParameterList([nn.Parameter(torch.full((6,), 1.0 + i)) for i in range(2)])

    def forward(self, x, step):
        for factor in self.factors:
            x = self.inner(x) * factor
        return x.square().mean()


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 2)

    def forward(self, x, step):
        x = x.requires_grad_()
        for block in self.blocks:
            x = torch.tanh(checkpoint(block, x, use_reentrant=True))
        return self.head(x).square().mean()


MODELS = {
    "attention": Attention,
    "encoder": Encoder,
    "listed": Listed,
    "reentrant": Checkpointed,
}


def train(make, method, *, steps=6, attach=None):
    torch.manual_seed(2)
    net = make()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=0.1)
    with tw.attach(net, optimizer, method, **(attach or {})) as sync:
        for step in range(steps):
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
            net(x, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.clone() for name, value in net.state_dict().items()}, optimizer.state_dict(), sync


def equal(a, b):
    assert a[0].keys() == b[0].keys()
    for name, value in a[0].items():
        assert not value.isnan().any(), name
        assert torch.equal(value, b[0][name]), name
    for index, state in a[1]["state"].items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(b[1]["state"][index][key])), (index, key)


@pytest.mark.parametrize("fusion", ["none", 25])
@pytest.mark.parametrize("name", MODELS)
def test_bitwise_ssgd(name, fusion):
    deferred = train(MODELS[name], tw.DeAR(fusion=fusion, poison_stale=True))
    equal(train(MODELS[name], tw.SSGD()), deferred)


def test_the_plan_follows_the_order_of_need():
    plan = train(Attention, tw.DeAR(fusion="none"))[2].plan
    order = [name for bucket in reversed(plan.buckets()) for name in bucket.names]
    assert [name.partition(".")[0] for name in order] == ["embed"] * 2 + ["attention"] * 4 + ["head"] * 2


class Peeking(nn.Module):
    """From its second call on it reads a child's weight without calling the child."""

    def __init__(self):
        super().__init__()
        self.first, self.child = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, step):
        x = torch.tanh(self.first(x))
        x = self.child(x) if step == 0 else nn.functional.linear(x, self.child.weight, self.child.bias)
        return x.square().mean()


def test_a_read_behind_the_hooks_back_is_named():
    with pytest.raises(
        RuntimeError, match=r'child\.(weight|bias) was used before its update.*update_in_step=\("child",\)'
    ):
        train(Peeking, tw.DeAR(fusion="none"))
    equal(
        train(Peeking, tw.SSGD()), train(Peeking, tw.DeAR(fusion="none", update_in_step=("child",), poison_stale=True))
    )
    with pytest.raises(ValueError, match="no module 'chidl'"):
        train(Peeking, tw.DeAR(update_in_step=("chidl",)))
