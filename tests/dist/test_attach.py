"""The engine on real Gloo ranks: the same numbers as DDP and as LocalWorld."""

import cases
import pytest
import torch

import thinwire as tw
from spawned import run

pytestmark = pytest.mark.dist


def _against_ddp(rank, size, merge):
    ours, sync = cases.train(rank, 8, "ssgd", {"merge": merge})
    theirs = cases.train_ddp(rank, 8)
    stats = sync.stats()
    sync.close()
    worst = max(float((a - b).abs().max()) for a, b in zip(cases.weights(ours), cases.weights(theirs)))
    return worst, stats.bytes_sent, stats.dense_bytes, stats.steps


@pytest.mark.parametrize("merge", ["auto", "none", 0.002])
def test_ssgd_equals_ddp_bit_for_bit_on_two_ranks(merge):
    for worst, sent, dense, steps in run(_against_ddp, 2, merge):
        assert worst == 0.0
        assert sent == dense
        assert steps == 8


def test_ssgd_equals_ddp_on_four_ranks():
    for worst, *_ in run(_against_ddp, 4, "none"):
        assert worst < 1e-6


METHODS = [
    ("ssgd", {}),
    ("ssgd", {"ordered": True}),
    ("cast", {"dtype": torch.bfloat16}),
    ("acp", {"rank": 2, "merge": "none"}),
    ("powersgd", {"rank": 2, "merge": "none"}),
    ("topk", {"density": 0.1, "merge": "none"}),
    ("signsgd", {"merge": "none"}),
    ("cast", {"dtype": torch.int8, "merge": "none"}),
    ("qsgd", {}),
    ("terngrad", {}),
]


def _gradients(rank, size, steps):
    found = []
    for name, options in METHODS:
        net = cases.model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        with tw.attach(net, optimizer, name, dense="none", start_compression_step=0, **options) as sync:
            seen = []
            for step in range(steps):
                cases.loss_of(net, rank, step).backward()
                seen.append({n: p.grad.clone() for n, p in net.named_parameters()})
                optimizer.step()  # what is held back counts from here on
                optimizer.zero_grad()
            residuals = {n: r.clone() for n, r in sync.state.residuals.items()}
            found.append((seen, sync.stats().bytes_sent, residuals))
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_every_method_equals_local_world(size):
    steps = 5
    results = run(_gradients, size, steps)
    for index, (name, options) in enumerate(METHODS):
        # Gloo adds 16-bit floats in 16 bit, LocalWorld in fp32
        near = {"rtol": 0.02, "atol": 1e-3} if name == "cast" else {"rtol": 1e-4, "atol": 1e-6}
        world = tw.LocalWorld(size)
        net = cases.model()
        method = tw.method(name, **options)
        for step in range(steps):
            local = []
            for rank in range(size):
                net.zero_grad()
                cases.loss_of(net, rank, step).backward()
                local.append({n: p.grad.clone() for n, p in net.named_parameters()})
            expected = world.step(method, local)
            for rank in range(size):
                for n, value in expected[rank].items():
                    torch.testing.assert_close(results[rank][index][0][step][n], value, **near)
        assert [r[index][1] for r in results] == world.bytes_sent(), name
        for rank, residuals in enumerate(world.residuals()):
            for n, value in residuals.items():
                torch.testing.assert_close(results[rank][index][2][n], value, **near)
