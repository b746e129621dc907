"""What ACP-SGD and Power-SGD compute, against the formulas (fp64)."""

import math

import pytest
import torch
from worlds import decaying, draw, label, mean

from rounding import of_sums
from thinwire.core.kernels.seeding import normal
from thinwire.core.methods.acp import ACP
from thinwire.core.methods.powersgd import PowerSGD
from thinwire.core.program import LocalWorld

CPU = torch.device("cpu")


def query(seed, name, rows, rank, *more):
    return torch.linalg.qr(normal(rows, rank, seed, name, *more, dtype=torch.float64, device=CPU)).Q


def reference(matrices, rank, q, p, steps, first):
    """Alternating power iteration with feedback, written straight from the formulas, one rank.

    first "p": even steps send A Q; "q": even steps send At P, as epfml/powersgd does with one iteration a step.
    """
    residual = torch.zeros_like(matrices[0])
    for t in range(steps):
        a = matrices[t] + residual
        if (t % 2 == 0) == (first == "p"):
            approximation = a @ q @ q.T
            p = torch.linalg.qr(a @ q)[0]
        else:
            approximation = p @ p.T @ a
            q = torch.linalg.qr(a.T @ p)[0]
        residual = a - approximation
        yield approximation


@pytest.mark.parametrize("first", ["p", "q"])
def test_equals_the_straight_line_power_iteration(first):
    matrices = [draw(t, {"w": (40, 30)})[0]["w"] for t in range(9)]
    world, skip = LocalWorld(1), 0 if first == "p" else 1
    method = ACP(rank=4)
    if skip:  # a rejected step 0 turns the order round
        world.step(method, [{"w": torch.full((40, 30), torch.nan, dtype=torch.float64)}])
    q, p = query(0, "w", 30, 4), query(0, "w", 40, 4, "p")
    for t, want in enumerate(reference(matrices, 4, q, p, 8, first)):
        got = world.step(method, [{"w": matrices[t]}])[0]["w"]
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("tall", [False, True])
def test_power_sgd_equals_the_paper(tall):
    matrices = [draw(t, {"w": (30, 40)})[0]["w"] for t in range(8)]
    world, residual = LocalWorld(1), torch.zeros(30, 40, dtype=torch.float64)
    q = query(0, "w", 40, 4, "p") if tall else query(0, "w", 40, 4)
    for m in matrices:
        a = m + residual
        p = torch.linalg.qr(a @ q)[0]
        q = a.T @ p
        residual = a - p @ q.T
        got = world.step(PowerSGD(rank=4, min_rate=1), [{"w": m.T if tall else m}])[0]["w"]
        torch.testing.assert_close(got.T if tall else got, p @ q.T, rtol=0, atol=1e-12)
        q = torch.linalg.qr(q)[0]


@pytest.mark.parametrize("g,least,most", [(0.244, 0.5 * 0.244, 1.1 * 0.244), (0.9, 0.98 * 0.9, 1.02 * 0.9)])
def test_subspace_iteration_converges_at_the_gap(g, least, most):
    m, best = decaying(g=g)
    noise = draw(1, {"w": (40, 30)})[0]["w"]
    world = LocalWorld(2)
    distances = []
    for _ in range(61):
        out = world.step(ACP(rank=4, error_feedback=False), [{"w": m + noise}, {"w": m - noise}])
        distances.append((out[0]["w"] - best).norm().item())
    if g < 0.5:
        assert distances[60] <= 1e-12
        start, end = 3, 10
    else:
        start, end = 30, 60
    rate = (distances[end] / distances[start]) ** (1 / (end - start))
    assert least <= rate <= most


def test_time_mean_tends_to_the_gradient():
    m = draw(3, {"w": (40, 30)})[0]["w"]
    errors = {}
    world, total = LocalWorld(1), torch.zeros(40, 30, dtype=torch.float64)
    for step in range(1, 501):
        total += world.step(ACP(rank=4), [{"w": m}])[0]["w"]
        if step in (10, 100, 500):
            errors[step] = ((total / step - m).norm() / m.norm()).item()
    for step, published in ((10, 0.59), (100, 0.078), (500, 0.015)):
        assert errors[step] <= 1.1 * published


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (4, 4), (3, 2, 2), (1, 6), (6, 1)])
def test_full_rank_is_the_average(shape):
    gradients = [draw(step, {"w": shape}, 3) for step in range(6)]
    rows, columns = shape[0], math.prod(shape[1:])
    product = 2 * (rows + columns) * min(rows, columns)  # of a basis of that rank, and onto it and back
    cases = [(ACP(rank=4), 0), (PowerSGD(rank=4), 0), (PowerSGD(rank=9, compress="matrices"), product)]
    if shape == (4, 4):
        cases.append((ACP(rank=4, compress="matrices"), product))
    for method, terms in cases:
        world = LocalWorld(3)
        size = torch.linalg.norm if terms else lambda x: x.abs().max()
        tolerance = of_sums(3 + terms, max(float(size(x["w"])) for g in gradients for x in g))
        for g in gradients:
            out, want = world.step(method, g)[0]["w"], (g[0]["w"] + g[1]["w"] + g[2]["w"]) / 3
            torch.testing.assert_close(out, want, rtol=0, atol=tolerance)


def test_rank_one_gradients_are_recovered():
    draw_ = torch.Generator().manual_seed(0)
    u, v = torch.randn(20, 1, generator=draw_).double(), torch.randn(15, 1, generator=draw_).double()
    for method in (ACP(rank=1, error_feedback=False), ACP(rank=1)):
        world = LocalWorld(3)
        for step in range(12):
            c = torch.randn(3, generator=draw_).double()
            gradients = [{"w": x * u @ v.T} for x in c]
            out = world.step(method, gradients)[0]["w"]
            if not method.error_feedback and step >= 1:
                torch.testing.assert_close(out, mean(gradients)["w"], rtol=0, atol=1e-12)
            if method.error_feedback and step % 2 == 1:
                assert all(r["w"].abs().max() <= 1e-11 for r in world.residuals())


@pytest.mark.parametrize("method", [ACP(rank=2, min_rate=1), PowerSGD(rank=2, min_rate=1)], ids=label)
@pytest.mark.parametrize("ranks", [2, 4, 5])
def test_many_ranks_on_parts_equal_one_rank_on_the_whole(method, ranks):
    """Linear regression by SGD: both runs see the same mean gradient, in parts or whole."""
    x, y = draw(0, {"x": (20, 12)})[0]["x"], draw(1, {"y": (20, 9)})[0]["y"]
    weights = {}
    for size in (1, ranks):
        world, w = LocalWorld(size), torch.zeros(12, 9, dtype=torch.float64)
        parts = list(zip(x.chunk(size), y.chunk(size)))
        for _ in range(20):
            gradients = [{"w": a.T @ (a @ w - b) / len(a)} for a, b in parts]
            w = w - 0.02 * world.step(method, gradients)[0]["w"]
        weights[size] = (w, mean(world.residuals())["w"])
    for one, many in zip(weights[1], weights[ranks]):
        torch.testing.assert_close(one, many, rtol=0, atol=1e-10)


@pytest.mark.parametrize("method", [ACP(rank=4), PowerSGD(rank=4)], ids=label)
def test_local_residuals_stay_bounded(method):
    """Different fixed gradients per rank: the error against the *global* reconstruction would grow without end."""
    gradients = draw(5, {"w": (40, 30)}, 4)
    world, early = LocalWorld(4), 0.0
    for step in range(1, 1001):
        world.step(method, gradients)
        if step == 100:
            early = max(r["w"].norm().item() for r in world.residuals())
    late = max(r["w"].norm().item() for r in world.residuals())
    assert late <= 1.3 * early
    assert all(r["w"].norm() <= 10 * g["w"].norm() for r, g in zip(world.residuals(), gradients))
