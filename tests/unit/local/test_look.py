"""Slow look-ahead against EMA-Nesterov by hand; what it does to rounds; and that only training forwards see it."""

import copy
import gc
import weakref

import pytest
import torch
from local_ranks import Ranks, close, drawn, equal, mean_walk, virtual
from torch import nn
from torch.utils.checkpoint import checkpoint

import thinwire as tw
from thinwire.core.methods.cast import Cast
from thinwire.core.methods.topk import TopK
from thinwire.engine.local import Local, Nesterov
from thinwire.engine.look import Look

RATE = 0.1


def pull(weights, seed):
    """A gradient that depends on the weights: of a quadratic with another centre at each step."""
    return {name: x - centre for (name, x), centre in zip(weights.items(), drawn(seed)[0].values())}


def ema_nesterov(weights, look, steps):
    """By the paper's lines: p += beta buf; a step of the optimizer; buf.lerp_(p - p_prev, 1 - gamma)."""
    weights = {name: x.clone() for name, x in weights.items()}
    buf = {name: torch.zeros_like(x) for name, x in weights.items()}
    for step in range(steps):
        before = {name: x.clone() for name, x in weights.items()}
        for name, x in weights.items():
            x += look.beta * buf[name]
        for name, gradient in pull(weights, 50 + step).items():
            weights[name] -= RATE * gradient
            buf[name].lerp_(weights[name] - before[name], 1 - look.gamma)
    return weights


@pytest.mark.parametrize("look", [Look(), Look(0.3, 0.9), Look(0.0)])
def test_one_rank_and_a_period_of_one_step_are_ema_nesterov(look):
    world = Ranks(Local(1, look=look), equal(1))
    for step in range(30):
        world.look()
        for name, gradient in pull(world.weights[0], 50 + step).items():
            world.weights[0][name].sub_(RATE * gradient)
        world.step()
    close(world.outer(), ema_nesterov(equal(1)[0], look, 30))


def module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def train(net, optimizers, steps, first=0):
    for step in range(first, first + steps):
        x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        net(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def by_hand(net, steps):
    buf = [torch.zeros_like(p) for p in net.parameters()]
    optimizer, look = torch.optim.SGD(net.parameters(), RATE, momentum=0.9), Look()
    for step in range(steps):
        before = [p.detach().clone() for p in net.parameters()]
        with torch.no_grad():
            for p, slow in zip(net.parameters(), buf):
                p.add_(slow, alpha=look.beta)
        train(net, [optimizer], 1, step)
        with torch.no_grad():
            for p, was, slow in zip(net.parameters(), before, buf):
                slow.lerp_(p - was, 1 - look.gamma)
    return net


def same(one, other):
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


@pytest.mark.parametrize("method", ["ssgd", "int8", "local"])
@pytest.mark.parametrize("several", [False, True])
def test_attach_does_the_same_to_a_model_on_one_rank(method, several):
    net = module()
    parameters = list(net.parameters())
    groups = [parameters[:1], parameters[1:]] if several else [parameters]
    optimizers = [torch.optim.SGD(some, RATE, momentum=0.9) for some in groups]
    name, options = ("cast", {"dtype": "int8"}) if method == "int8" else (method, {})
    with tw.attach(net, optimizers, name, look=0.5 if several else Look(), **options):
        train(net, optimizers, 12)
    same(net, by_hand(module(), 12))


@pytest.mark.parametrize(
    ("every", "codec", "delay", "fragments"),
    [(1, None, 0, 1), (4, Cast("int2", block=16), 0, 1), (4, Cast("int2", block=16), 1, 2), (8, TopK(0.1), 7, 4)],
    ids=str,
)
def test_steps_and_looks_alone_move_the_virtual_iterate(every, codec, delay, fragments):
    world = Ranks(Local(every, codec, fragments=fragments, fragment_sync_delay=delay, look=Look()), equal(3))
    looked = {name: torch.zeros_like(x) for name, x in world.weights[0].items()}
    for step in range(3 * every + 5):
        before = {name: x.clone() for name, x in world.weights[0].items()}
        world.look()
        for name, x in world.weights[0].items():
            looked[name] += x - before[name]
        for own, change in zip(world.weights, drawn(1000 + step, 3), strict=True):
            for name, x in own.items():
                x.sub_(0.01 * change[name])
        world.step()
        expected = {name: x + looked[name] for name, x in mean_walk(3, step + 1).items()}
        close(virtual(world), expected)
    assert max(float(x.abs().max()) for x in looked.values()) > 0.001
    world.finish()
    for rank in (1, 2):
        assert all(torch.equal(x, world.weights[0][name]) for name, x in world.weights[rank].items())


def test_the_mean_follows_the_outer_weights_by_the_steps_since_the_last_merge():
    look = Look(0.5, 0.8)
    world = Ranks(Local(3, None, outer=Nesterov(0.7, 0.5), look=look), equal(2))
    slow, outer = {name: torch.zeros_like(x) for name, x in world.weights[0].items()}, equal(1)[0]
    for step in range(9):
        world.look()
        for own, change in zip(world.weights, drawn(1000 + step, 2), strict=True):
            for name, x in own.items():
                x.sub_(0.01 * change[name])
        world.step()
        if step % 3 == 2:
            for name, x in world.outer().items():
                slow[name] = 0.8**3 * slow[name] + (1 - 0.8**3) * (x - outer[name]) / 3
                outer[name] = x.clone()
    for rounds in world.rounds:
        close(dict(zip(rounds.fragments[0].parameters, rounds.fragments[0].slow)), slow)


def test_only_forwards_that_train_see_it():
    net = module()
    optimizer = torch.optim.SGD(net.parameters(), RATE, momentum=0.9)
    with tw.attach(net, optimizer, "ssgd", look=Look()):
        train(net, [optimizer], 5)
        kept = copy.deepcopy(net.state_dict())
        x = torch.ones(1, 6, dtype=torch.float64)
        net.eval()
        net(x)
        net.train()
        with torch.no_grad():
            net(x)
        assert all(torch.equal(kept[name], value) for name, value in net.state_dict().items())
        net[2](net[1](net[0](x)))  # a part of the model is enough
        moved = copy.deepcopy(net.state_dict())
        assert not any(torch.equal(kept[name], value) for name, value in moved.items())
        net(x)  # once for each step
        assert all(torch.equal(moved[name], value) for name, value in net.state_dict().items())


def test_a_forward_that_is_rerun_inside_backward_does_not_move_the_weights():
    net = module()
    optimizer = torch.optim.SGD(net.parameters(), RATE, momentum=0.9)
    with tw.attach(net, optimizer, "local", look=Look()):
        train(net, [optimizer], 3)
        kept = copy.deepcopy(net.state_dict())
        x = torch.ones(1, 6, dtype=torch.float64, requires_grad=True)
        # Only here: the first forward is without gradients, the second one inside backward.
        checkpoint(lambda x: net[2](net[1](net[0](x))), x, use_reentrant=True).sum().backward()
        assert all(torch.equal(kept[name], value) for name, value in net.state_dict().items())


def test_a_handle_that_is_forgotten_does_not_keep_the_model():
    net = module()
    optimizer = torch.optim.SGD(net.parameters(), RATE)
    tw.attach(net, optimizer, "ssgd", look=Look())
    train(net, [optimizer], 2)
    gone = weakref.ref(net)
    del net, optimizer
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("method", ["ssgd", "local"])
def test_a_step_that_a_scaler_skips_is_not_looked_ahead_again(method):
    net = module()
    optimizer, scaler = torch.optim.SGD(net.parameters(), RATE), torch.amp.GradScaler("cpu", init_scale=4.0)
    with tw.attach(net, optimizer, method, look=Look(), scaler=scaler):
        for step in range(6):
            x = torch.ones(1, 6, dtype=torch.float64)
            before = copy.deepcopy(net.state_dict())
            loss = net(x).square().mean()
            ahead = copy.deepcopy(net.state_dict())
            scaler.scale(loss * (float("inf") if step == 4 else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            looked = not all(torch.equal(before[name], value) for name, value in ahead.items())
            assert looked == (step in (1, 2, 3, 4)), step


def test_frozen_parameters_stay():
    net = module()
    optimizer = torch.optim.SGD(net.parameters(), RATE)
    for method in ("ssgd", "local"):
        with tw.attach(net, optimizer, method, look=Look()):
            train(net, [optimizer], 4)
            net[0].requires_grad_(False)
            kept = net[0].weight.clone()
            train(net, [optimizer], 3, 4)
            assert torch.equal(kept, net[0].weight)
            net[0].requires_grad_(True)


def test_a_saved_mean_goes_on():
    whole, parts = module(), module()
    optimizers = [torch.optim.SGD(net.parameters(), RATE, momentum=0.9) for net in (whole, parts)]
    with tw.attach(whole, optimizers[0], "ssgd", look=Look()):
        train(whole, optimizers[:1], 9)
    with tw.attach(parts, optimizers[1], "ssgd", look=Look()) as sync:
        train(parts, optimizers[1:], 4)
        saved = sync.state_dict()
    with tw.attach(parts, optimizers[1], "ssgd", look=Look()) as sync:
        sync.load_state_dict(saved)
        train(parts, optimizers[1:], 5, 4)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), parts.parameters()))


@pytest.mark.parametrize(
    ("method", "options", "error"),
    [
        ("auto", {}, "look= follows the weights after each step"),
        ("dear", {}, "look= follows the weights after each step"),
        ("ssgd", {"look": True}, r"look=True must be a thinwire.Look"),
        ("local", {"look": "yes"}, r"look='yes' must be a thinwire.Look"),
    ],
)
def test_refusals(method, options, error):
    net = module()
    with pytest.raises((ValueError, TypeError), match=error):
        tw.attach(net, torch.optim.SGD(net.parameters(), RATE), method, **{"look": Look(), **options})


def test_looks_that_are_no_looks():
    for options in ({"beta": 1.0}, {"beta": -0.1}, {"gamma": 1.0}, {"gamma": float("nan")}):
        with pytest.raises(ValueError, match="Look"):
            Look(**options)
    net = module()
    with pytest.raises(ValueError, match="give attach the optimizer"):
        tw.attach(net, None, "ssgd", look=Look())
