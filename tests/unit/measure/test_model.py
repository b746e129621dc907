from itertools import count

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from thinwire.core.pricing.profiles import ModelProfile
from thinwire.predict.measure import profile_model


class Clock:
    """Stands still unless a module moves it."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Advance(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, clock, forward, backward):
        ctx.clock, ctx.backward_seconds = clock, backward
        clock.now += forward
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.now += ctx.backward_seconds
        return gradient, None, None, None


class Scale(nn.Module):
    """One parameter; takes so long forward, and so long before its gradient is there."""

    def __init__(self, clock, forward, backward, size=3):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.times = (clock, forward, backward)

    def forward(self, x):
        return Advance.apply(x * self.weight, *self.times)


def profiled(model, clock, **options):
    options = {"steps": 3, "warmup": 1, "clock": clock, **options}
    return profile_model(model, [torch.ones(2, 3)], lambda model, x: model(x).sum(), **options)


def test_seconds_in_backward_order():
    clock = Clock()
    model = nn.Sequential(Scale(clock, 1, 30), nn.Identity(), Scale(clock, 2, 20), Scale(clock, 4, 10))
    done = []
    profile = profiled(
        model, clock, name="three", batch="2 rows", on_step=lambda step, total: done.append((step, total))
    )
    assert [(t.name, t.shape, t.backward_seconds) for t in profile.tensors] == [
        ("3.weight", (3,), 10),
        ("2.weight", (3,), 20),
        ("0.weight", (3,), 30),
    ]
    assert [(m.name, m.forward_seconds) for m in profile.modules] == [("0", 1), ("1", 0), ("2", 2), ("3", 4)]
    assert profile.forward_seconds == 7
    assert profile.provenance == "measured here"
    assert profile.source.endswith("median of 3 steps, 2 rows")
    assert (profile.name, profile.dtype_bytes) == ("three", 4)
    assert done == [(n, 4) for n in (1, 2, 3, 4)]
    assert ModelProfile.from_json(profile.to_json()) == profile


def test_the_sum_is_that_of_the_pass_when_steps_differ():
    clock = Clock()
    model = nn.Sequential(Scale(clock, 0, 1), Scale(clock, 0, 1), Scale(clock, 0, 1))
    lasts = iter([(1, 1, 1), (5, 1, 2), (1, 9, 1), (2, 2, 2)])

    def loss(model, step):
        for layer, seconds in zip(model, next(lasts)):
            layer.times = (clock, 0, seconds)
        return model(torch.ones(3)).sum()

    profile = profile_model(model, count(), loss, steps=3, clock=clock, warmup=1)
    assert sum(profile.backward_seconds) == 8  # the median of 8, 11 and 6
    assert all(seconds >= 0 for seconds in profile.backward_seconds)


class Odd(nn.Module):
    """A shared weight, a frozen layer, one used nowhere, one used every other time, a norm with buffers, dropout."""

    def __init__(self, clock):
        super().__init__()
        self.first = Scale(clock, 1, 1)
        self.frozen = Scale(clock, 1, 1).requires_grad_(False)
        self.never = nn.Linear(3, 3)
        self.sometimes = Scale(clock, 1, 5)
        self.again = Scale(clock, 1, 1)
        self.again.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        x = self.again(self.drop(self.norm(self.frozen(self.first(x)))))
        if torch.rand(()) < 0.5:
            x = self.sometimes(x)
        return x


def state_of(model):
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    hooks += [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]
    return {k: v.clone() for k, v in model.state_dict().items()}, hooks, torch.get_rng_state()


def same(a, b):
    return a[0].keys() == b[0].keys() and all(torch.equal(a[0][k], b[0][k]) for k in a[0]) and a[1] == b[1]


def test_odd_models_and_nothing_is_left_behind():
    clock = Clock()
    torch.manual_seed(4)
    model = Odd(clock)
    model.first.weight.grad = kept = torch.full((3,), 7.0)
    before, buffer = state_of(model), model.norm.running_mean
    profile = profiled(model, clock, steps=8)
    after = state_of(model)
    assert same(before, after)
    assert torch.equal(before[2], after[2])
    assert model.norm.running_mean is buffer
    assert model.first.weight.grad is kept
    assert torch.equal(kept, torch.full((3,), 7.0))
    assert model.norm.weight.grad is None
    assert model.training
    names = [t.name for t in profile.tensors]
    assert sorted(names) == sorted(n for n, p in model.named_parameters() if p.requires_grad)
    assert set(names[-2:]) == {"never.weight", "never.bias"}
    assert profile.backward_seconds[-2:] == [0, 0]
    assert names.index("sometimes.weight") < names.index("first.weight")
    assert "never" not in {m.name for m in profile.modules}


def test_an_error_leaves_nothing_behind_either():
    clock = Clock()
    model = Odd(clock)
    before = state_of(model)

    def loss(model, step):
        value = model(torch.ones(2, 3)).sum()
        if step == 2:
            raise ArithmeticError("as planned")
        return value

    with pytest.raises(ArithmeticError):
        profile_model(model, count(), loss, clock=clock)
    assert same(before, state_of(model))


def test_modules_with_parameters_of_their_own_count_without_those_inside():
    clock = Clock()

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.inner = Scale(clock, 4, 1)

        def forward(self, x):
            return Advance.apply(self.inner(x) * self.scale, clock, 2, 1)

    profile = profiled(nn.Sequential(Outer()), clock)
    assert [(m.name, m.forward_seconds) for m in profile.modules] == [("0", 2), ("0.inner", 4)]
    assert profile.forward_seconds == 6


def test_checkpointed_layers_count_once_forward_and_with_their_repetition_backward():
    clock = Clock()
    layers = nn.Sequential(Scale(clock, 3, 10), Scale(clock, 3, 20))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            return checkpoint(self.layers, x, use_reentrant=False)

    profile = profiled(Model(), clock)
    assert [(m.name, m.forward_seconds) for m in profile.modules] == [("layers.0", 3), ("layers.1", 3)]
    # Layer 0 again, and layer 1 until its product is there: nothing behind that is needed.
    assert [(t.name, t.backward_seconds) for t in profile.tensors] == [("layers.1.weight", 23), ("layers.0.weight", 10)]


def test_a_time_limit_ends_it_early():
    clock = Clock()
    profile = profiled(nn.Sequential(Scale(clock, 1, 1)), clock, steps=50, seconds=0.0)
    assert "median of 3 steps" in profile.source


@pytest.mark.parametrize(
    "change, says",
    [
        ({"steps": 0}, "steps=0"),
        ({"warmup": -1}, "warmup=-1"),
        ({"loss": lambda model, step: torch.ones(())}, "scalar"),
        ({"loss": lambda model, step: 3.0}, "scalar"),
        ({"model": nn.Linear(2, 2).requires_grad_(False)}, "no trainable parameter"),
    ],
)
def test_bad_words(change, says):
    net = nn.Linear(2, 2)
    words = {"model": net, "loss": lambda model, step: net(torch.ones(2)).sum(), **change}
    with pytest.raises(ValueError, match=says):
        profile_model(words.pop("model"), count(), words.pop("loss"), **words)


def test_sparse_gradients_are_refused_as_attach_refuses_them():
    net = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 1))
    with pytest.raises(ValueError, match=r"0\.weight gets sparse gradients, which thinwire does not exchange"):
        profile_model(net, [torch.tensor([1, 2])], lambda net, x: net(x).sum(), steps=1, warmup=0)


def test_sixteen_bit_gradients():
    net = nn.Linear(4, 4).bfloat16()
    profile = profile_model(net, [torch.ones(2, 4).bfloat16()], lambda net, x: net(x).sum(), steps=1, warmup=0)
    assert profile.dtype_bytes == 2
