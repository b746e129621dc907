"""Rule 2: applied + mean residual after = mean (gradient + residual before), at every step and over a whole run."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import FEEDBACK, PLAN, SHAPES, draw, label, mean

from thinwire.core.methods.acp import ACP
from thinwire.core.methods.topk import TopK
from thinwire.core.program import LocalWorld


def run(method, world, steps, tolerance, shapes=SHAPES, seed=0):
    before = [{name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}] * world.size
    owed = mean(before)
    for step in range(steps):
        gradients = draw(1000 * seed + step, shapes, world.size)
        out = world.step(method, gradients)
        assert all(torch.equal(out[0][name], other[name]) for other in out for name in shapes)
        after = [{**b, **r} for b, r in zip(before, world.residuals())]
        m, old, new = mean(gradients), mean(before), mean(after)
        for name in shapes:
            torch.testing.assert_close(out[0][name] + new[name], m[name] + old[name], rtol=0, atol=tolerance)
            owed[name] = owed[name] + m[name] - out[0][name]
        before = after
    for name in shapes:
        torch.testing.assert_close(owed[name], mean(before)[name], rtol=0, atol=100 * tolerance)


@pytest.mark.parametrize("method", FEEDBACK, ids=label)
def test_every_step_and_telescoped(method):
    run(method, LocalWorld(4, plan=PLAN), 60, 1e-13)


@settings(max_examples=40, deadline=None)
@given(
    method=st.sampled_from(FEEDBACK),
    size=st.sampled_from([1, 2, 3, 5, 6, 7, 8, 12]),
    shapes=st.lists(st.lists(st.integers(0, 6), max_size=3), min_size=1, max_size=4),
    single=st.booleans(),
    seed=st.integers(0, 999),
)
def test_any_shapes_any_world(method, size, shapes, single, seed):
    named = {str(i): tuple(shape) for i, shape in enumerate(shapes)}
    plan = [list(named)] if single else None
    run(method, LocalWorld(size, plan=plan), 3, 1e-12, named, seed)


@pytest.mark.parametrize("method", FEEDBACK, ids=label)
def test_an_unused_parameter_still_pays_its_debt(method):
    world = LocalWorld(2, plan=[["w", "b"]])
    shapes = {"w": (12, 9), "b": (5,)}
    before = None
    for step in range(6):
        gradients = draw(step, shapes, 2)
        if step % 2:
            gradients[1]["w"] = None
        if step == 5:
            gradients[0]["w"] = None
        seen = [
            {n: torch.zeros(shapes[n], dtype=torch.float64) if g[n] is None else g[n] for n in g} for g in gradients
        ]
        out = world.step(method, gradients)
        after = mean([{**{n: 0 * s[n] for n in s}, **r} for s, r in zip(seen, world.residuals())])
        old = 0 if before is None else before["w"]
        torch.testing.assert_close(out[1]["w"] + after["w"], mean(seen)["w"] + old, rtol=0, atol=1e-12)
        before = after


@pytest.mark.parametrize("method", FEEDBACK, ids=label)
def test_channels_last_is_only_a_layout(method):
    worlds = [LocalWorld(2), LocalWorld(2)]
    for step in range(4):
        gradients = draw(step, {"conv": (6, 4, 3, 3)}, 2)
        other = [{"conv": g["conv"].to(memory_format=torch.channels_last)} for g in gradients]
        a, b = worlds[0].step(method, gradients), worlds[1].step(method, other)
        assert torch.equal(a[0]["conv"], b[0]["conv"])
    assert torch.equal(worlds[0].residuals()[1]["conv"], worlds[1].residuals()[1]["conv"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", FEEDBACK, ids=label)
def test_low_precision_gradients_keep_fp32_residuals(method, dtype):
    world = LocalWorld(2, plan=PLAN)
    for step in range(3):
        out = world.step(method, draw(step, ranks=2, dtype=dtype))
        assert all(x.dtype == dtype for x in out[0].values())
    assert all(x.dtype == torch.float32 for x in world.residuals()[0].values())


@pytest.mark.parametrize("method", FEEDBACK, ids=label)
def test_a_zero_gradient_never_enlarges_the_debt(method):
    world = LocalWorld(2)
    world.step(method, draw(0, {"w": (12, 9)}, 2))
    norm = mean(world.residuals())["w"].norm() if world.residuals()[0] else torch.zeros(())
    for _ in range(4):
        world.step(method, [{"w": torch.zeros(12, 9, dtype=torch.float64)}] * 2)
        now = sum(r["w"].norm() for r in world.residuals()) / 2
        assert mean(world.residuals())["w"].norm() <= max(norm, now) + 1e-12


@pytest.mark.parametrize("method", [TopK(0.2, error_feedback=False), ACP(2, error_feedback=False)], ids=label)
def test_without_feedback_nothing_is_kept(method):
    world = LocalWorld(2)
    for step in range(3):
        world.step(method, draw(step, {"w": (12, 9)}, 2))
    assert world.residuals() == [{}, {}]
    assert not method.has_residual
