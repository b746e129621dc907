"""The rank-ordered sum of a reduce-scatter, bit for bit against adding up one rank after the other."""

import pytest
import torch

import thinwire as tw
from thinwire.core.collectives.exchange import ordered_sum


def sequential(parts):
    total = parts[0].double() if parts[0].dtype == torch.float64 else parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_the_sum_is_sequential_and_cuts_do_not_matter(dtype, ranks):
    parts = torch.randn(ranks, 97, generator=torch.Generator().manual_seed(ranks), dtype=torch.float64).to(dtype)
    whole = ordered_sum(list(parts))
    assert whole.dtype == dtype
    assert torch.equal(whole, sequential(parts))
    for cut in (1, 32, 50):
        pieces = [ordered_sum(list(parts[:, :cut])), ordered_sum(list(parts[:, cut:]))]
        assert torch.equal(whole, torch.cat(pieces))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_bucket_boundaries_do_not_change_a_decoupled_average(dtype):
    draw = torch.Generator().manual_seed(0)
    shapes = {"a": (5,), "b": (3, 3), "c": (7,), "d": (2,)}
    gradients = [{n: torch.randn(s, generator=draw).to(dtype) for n, s in shapes.items()} for _ in range(3)]
    results = []
    for plan in (None, [["a", "b", "c", "d"]], [["d", "a"], ["c"], ["b"]]):
        for method in (tw.DeAR(), tw.SSGD(deterministic=True)):
            results.append(tw.LocalWorld(3, plan=plan).step(method, gradients))
    for other in results[1:]:
        assert all(torch.equal(a[n], b[n]) for a, b in zip(results[0], other) for n in shapes)


@pytest.mark.parametrize("plan", [None, [["w", "b"], ["v"]]])
def test_decoupled_programs_compute_what_coupled_ones_do(plan):
    factors = {"rank": 2, "min_rate": 1.0}
    twins = [
        (tw.SSGD(), tw.DeAR()),
        (tw.Cast("fp16"), tw.Cast("fp16", decoupled=True)),
        (tw.ACP(**factors), tw.ACP(**factors, decoupled=True)),
    ]
    for coupled, decoupled in twins:
        worlds = tw.LocalWorld(3, plan=plan), tw.LocalWorld(3, plan=plan)
        draw = torch.Generator().manual_seed(1)
        for _ in range(5):
            shapes = {"w": (9, 8), "b": (5,), "v": (6, 7)}
            gradients = [{n: torch.randn(s, generator=draw) for n, s in shapes.items()} for _ in range(3)]
            a, b = worlds[0].step(coupled, gradients), worlds[1].step(decoupled, gradients)
            assert all(torch.equal(x[n], y[n]) for x, y in zip(a, b) for n in shapes)
        for a, b in zip(worlds[0].residuals(), worlds[1].residuals()):
            assert a.keys() == b.keys()
            assert all(torch.equal(a[n], b[n]) for n in a)
