"""DGC against torch's momentum SGD, its conservation law, masking, clipping, warm-up, decay and refusals."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from worlds import draw, mean

from thinwire.core.methods.base import Warmup
from thinwire.core.methods.dgc import DGC
from thinwire.core.program import Bucket, LocalWorld, Slot, State, Topology
from thinwire.core.program.local_world import run_lockstep

SHAPES = {"w": (12, 9), "v": (30,)}
PLAN = [["w", "v"]]


@dataclass(frozen=True)
class Sparse(DGC):
    """The sparse program at any density."""

    def reduce(self, bucket, state):
        yield from self.selected(bucket, state)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("made", [DGC, Sparse])
def test_density_one_is_momentum_sgd(made, size, nesterov):
    """Bit for bit on two ranks with integer gradients and mu = 1/2, where no sum rounds; else to rounding."""
    for mu, whole in ((0.9, False), (0.5, True)):
        method = made(1.0, momentum=mu, nesterov=nesterov, masking=False, select="exact")
        world, theirs = LocalWorld(size, plan=PLAN), {n: nn.Parameter(x) for n, x in draw(7, SHAPES)[0].items()}
        ours = {n: p.detach().clone() for n, p in theirs.items()}
        optimizer = torch.optim.SGD(theirs.values(), lr=0.125, momentum=mu, nesterov=nesterov)
        for step in range(20):
            gradients = draw(step, SHAPES, size)
            if whole:
                gradients = [{n: (8 * x).round() for n, x in g.items()} for g in gradients]
            for n, p in theirs.items():
                p.grad = mean(gradients)[n]
            optimizer.step()
            update = world.step(method, gradients)[0]
            ours = {n: x - 0.125 * update[n] for n, x in ours.items()}
        for n, p in theirs.items():
            if whole and size in (1, 2, 8):
                assert torch.equal(ours[n], p.detach())
            torch.testing.assert_close(ours[n], p.detach(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(
    "method",
    [DGC(0.05), DGC(0.1, nesterov=True), DGC(0.1, masking=False, value_dtype="bf16"), DGC(0.2, momentum=0.0)],
    ids=["plain", "nesterov", "bf16", "none"],
)
def test_nothing_is_lost(method, size):
    """The law of Top-k, with the momentum-corrected gradient in the gradient's place."""
    world, mu = LocalWorld(size, plan=PLAN), method.momentum
    owed = {n: torch.zeros(s, dtype=torch.float64) for n, s in SHAPES.items()}
    momenta = [dict(owed) for _ in range(size)]
    for step in range(12):
        gradients = draw(step, SHAPES, size)
        pushed = [
            {n: mu * (m[n] + g[n]) if method.nesterov else mu * m[n] + g[n] for n in g}
            for m, g in zip(momenta, gradients)
        ]
        out = world.step(method, gradients)
        momenta = [{n: s.locals["momentum", n] for n in SHAPES} for s in world.states]
        for n in SHAPES:
            entered = sum(p[n] + (g[n] if method.nesterov else 0) for p, g in zip(pushed, gradients))
            after = sum(r[n] for r in world.residuals())
            torch.testing.assert_close(after + size * out[-1][n], owed[n] + entered, rtol=0, atol=1e-12)
            owed[n] = after
            for rank in range(size):  # masked where sent, else the pushed one
                masked = (momenta[rank][n] == 0) & (pushed[rank][n] != 0)
                want = torch.where(masked, 0, pushed[rank][n])
                torch.testing.assert_close(momenta[rank][n], want, rtol=0, atol=1e-13)
                assert bool(masked.any()) <= method.masking


def test_masking_forgets_what_was_sent():
    world = LocalWorld(1)
    world.step(DGC(0.5, select="exact"), [{"w": torch.tensor([4.0, 3.0, 2.0, 1.0])}])
    assert world.states[0].locals["momentum", "w"].tolist() == [0, 0, 2, 1]
    assert world.residuals()[0]["w"].tolist() == [0, 0, 2, 1]


def test_clipping_bounds_each_rank():
    method = DGC(1.0, momentum=0.0, clip=2.0)
    big = {"w": torch.full((4,), 100.0)}
    out = LocalWorld(4).step(method, [big] * 4)[0]["w"]
    assert out.norm().item() == pytest.approx(2.0 / 2, rel=1e-5)  # clip / sqrt(P)
    small = {"w": torch.full((4,), 0.1)}
    torch.testing.assert_close(LocalWorld(4).step(method, [small] * 4)[0]["w"], small["w"])


def test_warmup():
    method = DGC(0.001, warmup=Warmup(10))
    kept = [method.kept(100_000, step) for step in (0, 9, 10, 20, 30, 40, 1000)]
    assert kept == [25118, 25118, 6309, 1584, 398, 100, 100]
    world = LocalWorld(2)
    world.step(replace(method, select="exact"), draw(0, {"w": (1000,)}, 2, torch.float32))
    assert world.bytes_sent() == [8 * 251] * 2


def stepped(method, slots, state):
    run_lockstep([method.reduce(Bucket(0, slots), state)], Topology(1))
    state.end_step()


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("made", [DGC, Sparse])
def test_decay_is_that_of_sgd(made, nesterov):
    method = made(1.0, nesterov=nesterov, weight_decay=0.1, masking=False, select="exact")
    theirs = nn.Parameter(draw(1, {"w": (5, 4)})[0]["w"])
    weight, state = theirs.detach().clone(), State(0, Topology(1))
    optimizer = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, nesterov=nesterov, weight_decay=0.1)
    for step in range(15):
        g = draw(step + 2, {"w": (5, 4)})[0]["w"]
        theirs.grad = g.clone()
        optimizer.step()
        slot = Slot("w", g.shape, g.clone(), g.dtype, g.device, weight)
        stepped(method, [slot], state)
        weight = weight - 0.1 * slot.result
    torch.testing.assert_close(weight, theirs.detach(), rtol=1e-10, atol=1e-12)


def test_dense_buckets_get_momentum_too():
    beside = DGC(0.01, momentum=0.8, nesterov=True).dense_method()
    assert (beside.density, beside.momentum, beside.nesterov) == (1.0, 0.8, True)


@pytest.mark.parametrize(
    "optimizer,words",
    [
        (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), "SGD(momentum=0.9, weight_decay=0)"),
        (lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=1e-4), "weight_decay=0.0001"),
        (lambda p: torch.optim.SGD([{"params": p}, {"params": [], "momentum": 0.5}], lr=0.05), "momentum=0.5"),
        (lambda p: torch.optim.AdamW(p, lr=0.05), "AdamW("),
    ],
)
def test_other_optimizers_are_refused(optimizer, words):
    with pytest.raises(ValueError, match="replace it with") as error:
        DGC().check_optimizer(optimizer([nn.Parameter(torch.zeros(2))]))
    assert words in str(error.value)
    assert "torch.optim.SGD(model.parameters(), lr=0.05)" in str(error.value)
    DGC().check_optimizer(torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.05))


def test_decay_without_parameters_is_refused():
    with pytest.raises(ValueError, match="weight_decay=0"):
        LocalWorld(2).step(DGC(0.1, weight_decay=0.1), draw(0, {"w": (5, 4)}, 2))
