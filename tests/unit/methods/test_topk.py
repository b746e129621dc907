import math

import pytest
import torch
from worlds import draw

from thinwire.core.methods.topk import TopK
from thinwire.core.program import LocalWorld, Topology
from thinwire.core.program.trace import trace


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


def test_what_stays_dense():
    method = TopK(0.1)
    assert method.dense("bias", (8,), embedding=False)
    assert method.dense("weight", (100, 8), embedding=True)
    assert not method.dense("weight", (8, 2), embedding=False)
