"""What can have a gradient, what is packed, and what the optimizer leaves alone."""

import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from supernet_nets import shaken, some, tiny, views

import thinwire as tw
from thinwire.systems.optim import LARS
from thinwire.systems.supernet import ActiveReduce, ActiveSet
from thinwire.systems.supernet.operators import ElasticBatchNorm
from thinwire.systems.supernet.reduce import InactiveWeights
from thinwire.systems.supernet.stereo import ElasticStereo


@pytest.fixture(scope="module")
def published():
    torch.manual_seed(0)
    return shaken(ElasticStereo())


def gradients(net, sub_net, size):
    net.zero_grad()
    net.activate(sub_net)
    sum(x.square().mean() for x in net(*views(*size))).backward()
    return {name: p.grad for name, p in net.named_parameters()}


def outside(active, name, x):
    """The gradient with its rectangle blanked."""
    x = x.clone()
    if active.rect(name) is not None:
        x[active.rect(name)] = 0
    return x


@pytest.mark.parametrize(
    "which,count,size", [("tiny", 14, (24, 48)), pytest.param("published", 5, (48, 48), marks=pytest.mark.slow)]
)
def test_the_set_holds_every_gradient_and_little_else(which, count, size, published, monkeypatch):
    monkeypatch.setattr(F, "relu", F.softplus)  # no unit is dead by chance
    net = published if which == "published" else shaken(tiny())
    for sub_net in some(net.space, count):
        active, reached = net.active_set(sub_net), 0
        for name, grad in gradients(net, sub_net, size).items():
            if active.rect(name) is None:
                assert grad is None, name
                continue
            assert grad is not None, name
            assert not outside(active, name, grad).any(), name
            reached += int((grad != 0).sum())
        assert reached > 0.8 * active.elements  # some rows of the kernel maps are structural zeros


@pytest.mark.slow
def test_mean_shares_of_the_published_space(published):
    net, rng = published, random.Random(0)
    for together, mean, tries in ((1, 0.34, 400), (2, 0.46, 150), (4, 0.59, 60), (6, 0.66, 40)):
        shares = [
            ActiveSet.union([net.active_set(net.sample(rng)) for _ in range(together)]).share for _ in range(tries)
        ]
        assert sum(shares) / tries == pytest.approx(mean, abs=0.03), together


@given(st.lists(st.integers(0, 2**20), min_size=1, max_size=4))
@settings(max_examples=12, deadline=None)
def test_a_union_holds_its_parts(seeds):
    net = tiny()
    sets = [net.active_set(net.sample(random.Random(seed))) for seed in seeds]
    union = ActiveSet.union(sets)
    assert max(s.elements for s in sets) <= union.elements <= sum(s.elements for s in sets)
    for name, shape in union.shapes.items():
        for s in sets:
            mask, parts = torch.zeros(shape), torch.zeros(shape)
            if s.rect(name) is not None:
                parts[s.rect(name)] = 1
            if union.rect(name) is not None:
                mask[union.rect(name)] = 1
            assert (parts <= mask).all()
    assert ActiveSet.union([union, *sets]) == union
    assert union.hash8(3) == ActiveSet.union(sets[::-1]).hash8(3)
    assert len(union.hash8(3)) == 8
    assert union.hash8(3) != union.hash8(4)


SHAPES = {"a": (6, 5), "b": (4,), "c": (3, 3), "d": (2, 2)}
ACTIVE = ActiveSet.of(
    SHAPES, {"a": (slice(1, 4), slice(0, 2)), "b": (slice(0, 4),), "c": None, "d": (slice(0, 1), slice(0, 2))}
)


def made(seed, ranks=2):
    draw = torch.Generator().manual_seed(seed)
    every = [{name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()} for _ in range(ranks)]
    for mine in every:
        for name in SHAPES:
            mine[name] -= outside(ACTIVE, name, mine[name])
    return every


def active_reduce(inner, **options):
    method = ActiveReduce(inner, **options)
    method.announced.active = ACTIVE
    return method


@pytest.mark.parametrize("plan", [None, [["a", "b"], ["c"], ["d"]], [["a", "b", "c", "d"]]])
def test_packed_sums_are_the_sums_and_only_rectangles_travel(plan):
    world, dense = tw.LocalWorld(2, plan=plan), tw.LocalWorld(2, plan=plan)
    for step in range(3):
        grads = made(step)
        grads[1]["b"] = None if step == 1 else grads[1]["b"]  # unused on one rank
        found, wanted = world.step(active_reduce(tw.SSGD()), grads), dense.step(tw.SSGD(), grads)
        for a, b in zip(found, wanted):
            assert all(torch.equal(a[name], b[name]) for name in SHAPES)
    assert world.bytes_sent() == [3 * 4 * ACTIVE.elements] * 2
    assert ACTIVE.elements == 6 + 4 + 0 + 2


def test_values_outside_the_rectangles_are_not_delivered():
    grads = [{name: torch.ones(shape) for name, shape in SHAPES.items()} for _ in range(2)]
    for mine in tw.LocalWorld(2).step(active_reduce(tw.SSGD()), grads):
        for name in SHAPES:
            assert not outside(ACTIVE, name, mine[name]).any()
            assert mine[name].sum() == (1 - outside(ACTIVE, name, torch.ones(SHAPES[name]))).sum()


INNER = [tw.TopK(density=0.2), tw.TopK(density=0.3, exchange="gtopk"), tw.Cast("int8"), tw.SignSGD(), tw.DGC()]


@pytest.mark.parametrize("inner", INNER, ids=lambda method: method.name)
def test_residuals_of_inactive_elements_stay(inner):
    world = tw.LocalWorld(2, plan=[["a", "b"], ["c", "d"]])
    whole = [
        {n: torch.randn(s, generator=torch.Generator().manual_seed(7 + r)) for n, s in SHAPES.items()} for r in (0, 1)
    ]
    first = ActiveReduce(inner)
    world.step(first, whole)  # nothing announced: everything is exchanged, and every element owes something
    before = world.residuals()
    for step in range(3):
        world.step(active_reduce(inner), made(step))
    changed = 0
    for old, new in zip(before, world.residuals()):
        for name in old:
            assert torch.equal(outside(ACTIVE, name, old[name]), outside(ACTIVE, name, new[name]))
            changed += int((old[name] != new[name]).sum())
    assert changed > 0


def test_top_k_inside_loses_nothing():
    world = tw.LocalWorld(2, plan=[["a", "b", "c", "d"]])
    owed = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(6):
        grads = made(step)
        applied = world.step(active_reduce(tw.TopK(density=0.2)), grads)
        for name in SHAPES:
            mean = sum(g[name] for g in grads) / 2
            now = sum(r.get(name, torch.zeros(SHAPES[name])) for r in world.residuals()) / 2
            torch.testing.assert_close(mean + owed[name], applied[0][name] + now)
            owed[name] = now
    assert any(x.any() for x in owed.values())


def test_a_step_that_is_rejected_leaves_residuals():
    world = tw.LocalWorld(2)
    world.step(active_reduce(tw.TopK(density=0.2)), made(0))
    before, bad = world.residuals(), made(1)
    bad[1]["a"][1, 0] = torch.inf
    world.step(active_reduce(tw.TopK(density=0.2)), bad)
    for old, new in zip(before, world.residuals()):
        assert all(torch.equal(old[name], new[name]) for name in old)


OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.01),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
}


class Holder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        for name, shape in SHAPES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape)))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_skip_leaves_weights_and_moments_bit_for_bit(name):
    net = Holder()
    optimizer, now = OPTIMIZERS[name](net.parameters()), {"set": None}
    hooks = InactiveWeights(optimizer, net, lambda: now["set"])
    for step in range(5):
        now["set"] = None if step == 2 else ACTIVE  # first a step of the part alone, later one of everything
        before = {n: (p.detach().clone(), {k: v.clone() for k, v in optimizer.state.get(p, {}).items()
                                           if torch.is_tensor(v)}) for n, p in net.named_parameters()}  # fmt: skip
        for n, p in net.named_parameters():
            p.grad = made(step)[0][n] if now["set"] else torch.randn(SHAPES[n])
        optimizer.step()
        for n, p in net.named_parameters():
            weights, state = before[n]
            if now["set"] is None:
                assert not torch.equal(p, weights)
                continue
            assert torch.equal(outside(ACTIVE, n, p.detach()), outside(ACTIVE, n, weights))
            assert ACTIVE.rect(n) is None or not torch.equal(p, weights)
            for key, x in optimizer.state.get(p, {}).items():
                if torch.is_tensor(x) and x.shape == p.shape:
                    old = state.get(key, torch.zeros_like(x))
                    assert torch.equal(outside(ACTIVE, n, x), outside(ACTIVE, n, old)), key
    hooks.remove()
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    before = net.c.detach().clone()
    optimizer.step()
    assert not torch.equal(net.c, before)


def test_zero_moves_weights_as_a_zero_gradient_does():
    net, reference = Holder(), Holder()
    ours, theirs = (torch.optim.Adam(n.parameters(), lr=0.1, weight_decay=0.01) for n in (net, reference))
    InactiveWeights(ours, net, lambda: ACTIVE, "zero")
    for step in range(3):
        for n, p in net.named_parameters():
            p.grad = None if ACTIVE.rect(n) is None else made(step)[0][n]
            reference.get_parameter(n).grad = made(step)[0][n]
        ours.step()
        theirs.step()
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), reference.parameters()))
    assert not torch.equal(net.c, Holder().c)


def test_optimizers_that_mix_elements_run_full_steps_only():
    net = Holder()
    optimizer = LARS(net.parameters(), lr=0.1)
    now = {"set": ActiveSet.full(SHAPES)}
    InactiveWeights(optimizer, net, lambda: now["set"])
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    now["set"] = ACTIVE
    with pytest.raises(ValueError, match="LARS does not work element by element"):
        optimizer.step()
    with pytest.raises(ValueError, match="skip"):
        InactiveWeights(optimizer, net, lambda: None, "leave")


def test_a_batch_norm_that_keeps_its_statistics_for_ever():
    norm = ElasticBatchNorm(4, momentum=0.0)
    norm(torch.ones(2, 3, 4, 4))
    assert norm.running_mean.tolist() == [0.0] * 4
