import pytest
import torch
from worlds import draw

from thinwire.core.methods.sign import SignSGD
from thinwire.core.program import LocalWorld, Topology
from thinwire.core.program.trace import trace

MAJORITY = SignSGD(error_feedback=False, vote="majority")


def test_the_squared_error_is_known():
    x = draw(0, {"w": (30, 7)})[0]["w"]
    x[3] = 0
    world = LocalWorld(1)
    out = world.step(SignSGD(), [{"w": x}])[0]["w"]
    identity = x.square().sum() - x.abs().sum() ** 2 / x.numel()
    assert abs((x - out).square().sum() - identity) <= 1e-10
    assert out.unique().numel() == 2


def test_two_levels_are_the_means_of_both_sides():
    x = draw(0, {"w": (30, 7)})[0]["w"]
    out = LocalWorld(1).step(SignSGD(levels=2), [{"w": x}])[0]["w"]
    torch.testing.assert_close(out, torch.where(x >= 0, x[x >= 0].mean(), x[x < 0].mean()))
    one_sided = LocalWorld(1).step(SignSGD(levels=2), [{"w": x.abs()}])[0]["w"]
    torch.testing.assert_close(one_sided, x.abs().mean().expand_as(x))


@pytest.mark.parametrize("size", range(1, 8))
def test_majority_counts(size):
    gradients = draw(size, {"w": (9, 5)}, size)
    out = LocalWorld(size).step(MAJORITY, gradients)
    want = sum(g["w"].sign() for g in gradients).sign()
    assert all(torch.equal(rank["w"], want) for rank in out)


@pytest.mark.parametrize("size", range(1, 8))
def test_an_element_that_is_zero_everywhere_does_not_drift(size):
    world, zeros = LocalWorld(size), [{"w": torch.zeros(11)}] * size
    steps = [world.step(MAJORITY, zeros)[0]["w"] for _ in range(2)]
    assert (steps[0] + steps[1] == 0).all()
    if size % 2 == 0:
        assert (steps[0] == 0).all()


def test_bytes():
    shapes = {"w": (30, 7), "b": (5,), "s": ()}
    for levels in (1, 2):
        world = LocalWorld(4, plan=[list(shapes)])
        world.step(SignSGD(levels=levels), draw(0, shapes, 4, torch.float32))
        assert world.bytes_sent()[0] == 3 * (3 * 4 * levels + 27 + 1 + 1)
    (step,) = trace(SignSGD(), list(shapes.items()), Topology(4))
    assert step.message_bytes == 12 + 29
    assert SignSGD().payload([(30, 7), (5,), (), (0, 2)], 0) == [8, 2, 2, 0]
