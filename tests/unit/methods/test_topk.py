import math

import pytest
import torch
from worlds import draw, mean

from thinwire.core.methods.base import Warmup
from thinwire.core.methods.topk import TopK
from thinwire.core.program import LocalWorld, Topology
from thinwire.core.program.trace import trace


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_density_one_is_the_average(size):
    world, whole = LocalWorld(size), LocalWorld(size)
    for step in range(50):
        gradients = draw(step, {"w": (7, 3)}, size)
        rounded = [{"w": (8 * g["w"]).round()} for g in gradients]
        torch.testing.assert_close(world.step(TopK(1.0), gradients)[0]["w"], mean(gradients)["w"])
        exact = whole.step(TopK(1.0), rounded)[0]["w"]
        assert torch.equal(exact, sum(g["w"] for g in rounded) / size)
    assert (world.residuals()[0]["w"] == 0).all()


@pytest.mark.parametrize("d,k", [(10, 3), (12, 4), (100, 7)])
def test_a_constant_gradient_arrives_everywhere_in_time(d, k):
    world, seen = LocalWorld(2), torch.zeros(d, dtype=torch.bool)
    for _ in range(math.ceil(d / k)):
        seen |= world.step(TopK(k / d), [{"w": torch.ones(d)}] * 2)[0]["w"] != 0
    assert seen.all()


def test_frequency_is_proportional_to_the_gradient():
    g = 1 + torch.rand(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    world, count = LocalWorld(1), torch.zeros(100)
    for _ in range(4000):
        count += world.step(TopK(0.01), [{"w": g}])[0]["w"] != 0
    share = count / count.sum()
    assert ((share / (g / g.sum()).float() - 1).abs() <= 0.08).all()


def test_one_bucket_takes_the_global_top():
    shapes = {"a": (10, 10), "b": (100,)}
    gradients = draw(0, shapes)
    gradients[0]["b"] *= 0.01
    out = LocalWorld(1, plan=[["a", "b"]]).step(TopK(0.1), gradients)[0]
    assert (out["a"] != 0).sum() == 20
    assert (out["b"] != 0).sum() == 0
    sent = out["a"][out["a"] != 0].abs().min()
    assert sent >= (gradients[0]["a"] - out["a"]).abs().max()


def test_virtual_iterate_follows_sgd():
    """x_t minus lr times the mean residual is plain SGD on the gradients seen at x_t."""
    x = virtual = draw(0, {"w": (9, 9)})[0]["w"]
    world = LocalWorld(3)
    for step in range(50):
        gradients = [{"w": x + g["w"]} for g in draw(step + 1, {"w": (9, 9)}, 3)]
        x = x - 0.1 * world.step(TopK(0.05), gradients)[0]["w"]
        virtual = virtual - 0.1 * mean(gradients)["w"]
        torch.testing.assert_close(x - 0.1 * mean(world.residuals())["w"], virtual, rtol=0, atol=1e-10)


@pytest.mark.parametrize("value_dtype,pair", [("fp32", 8), ("fp16", 6), ("bf16", 6)])
def test_bytes(value_dtype, pair):
    world, shapes = LocalWorld(5, plan=[["a", "b"]]), {"a": (100, 10), "b": (50,)}
    method = TopK(0.02, value_dtype=value_dtype)
    world.step(method, draw(0, shapes, 5, torch.float32))
    k = 21
    message = 4 * k + -(-k * (pair - 4) // 4) * 4
    assert world.bytes_sent() == [4 * message] * 5
    (step,) = trace(method, list(shapes.items()), Topology(5))
    assert step.message_bytes == message
    assert method.payload([(1000,), (50,)], 0) == [40 if pair == 8 else 30, 2]


def test_warmup():
    method = TopK(0.001, warmup=Warmup(10))
    kept = [method.kept(100_000, step) for step in (0, 9, 10, 20, 30, 40, 1000)]
    assert kept == [25118, 25118, 6309, 1584, 398, 100, 100]


def test_what_stays_dense():
    method = TopK(0.1)
    assert method.dense("bias", (8,), embedding=False)
    assert method.dense("weight", (100, 8), embedding=True)
    assert not method.dense("weight", (8, 2), embedding=False)


def test_loss_scale_leaves_the_residual_alone():
    from thinwire.core.program import Bucket, Slot, State
    from thinwire.core.program.local_world import run_lockstep

    ends = []
    for scale in (None, 256.0):
        state = State(0, Topology(1))
        for step in range(4):
            value = draw(step, {"w": (16, 16)}, dtype=torch.float32)[0]["w"] * (scale or 1.0)
            slot = Slot("w", value.shape, value, value.dtype, value.device)
            bucket = Bucket(0, [slot], scale=None if scale is None else torch.tensor(scale))
            run_lockstep([TopK(0.1).reduce(bucket, state)], Topology(1))
            state.end_step()
        ends.append((state.residuals["w"], slot.result / (scale or 1.0)))
    assert torch.equal(ends[0][0], ends[1][0])
    assert torch.equal(ends[0][1], ends[1][1])


@pytest.mark.parametrize("density", [0, -0.1, 1.5, "0.1", True, None, float("nan")])
def test_density_is_a_share(density):
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        TopK(density)


def test_refusals():
    for options, words in (
        ({"exchange": "ring"}, "one of allgather, gtopk, oktopk, auto"),
        ({"exchange": "gtopk", "value_dtype": "bf16"}, 'gTop-k needs "fp32"'),
        ({"capacity": 0.9}, "capacity=0.9 must be a finite number and at least 1"),
        ({"select": "best"}, "select='best' is unknown"),
        ({"value_dtype": "int8"}, "fp32, bf16, fp16"),
        ({"warmup": 3}, "Warmup"),
        ({"fusion": "all"}, "fusion"),
    ):
        with pytest.raises(ValueError, match=words):
            TopK(0.1, **options)
