"""The engine on real Gloo ranks: the same numbers as DDP and as LocalWorld."""

import cases
import pytest
import torch
import torch.distributed as dist

import thinwire as tw
from spawned import run

pytestmark = pytest.mark.dist


def _against_ddp(rank, size):
    ours, sync = cases.train(rank, 8, "ssgd", {"fusion": "none"})
    theirs = cases.train_ddp(rank, 8)
    stats = sync.stats()
    sync.close()
    worst = max(float((a - b).abs().max()) for a, b in zip(cases.weights(ours), cases.weights(theirs)))
    return worst, stats.bytes_sent, stats.dense_bytes, stats.steps


def test_bucket_cap_mb_is_fusion_by_the_word_of_ddp():
    for name in ("bucket_cap_mb", "fusion"):
        net = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(5)))  # 1 KiB each
        with tw.attach(net, None, "ssgd", **{name: 0.002}) as sync:
            assert [len(bucket.names) for bucket in sync.plan.phases[0]] == [2, 2, 1]


def test_ssgd_equals_ddp_on_four_ranks():
    for worst, sent, dense, steps in run(_against_ddp, 4):
        assert worst < 1e-6
        assert sent == dense
        assert steps == 8


METHODS = [
    ("ssgd", {}),
    ("ssgd", {"deterministic": True}),
    ("cast", {"dtype": torch.bfloat16}),
    ("acp", {"rank": 2, "fusion": "none"}),
    ("powersgd", {"rank": 2, "fusion": "none"}),
    ("topk", {"density": 0.1, "fusion": "none"}),
    ("signsgd", {"fusion": "none"}),
    ("cast", {"dtype": torch.int8, "fusion": "none"}),
    ("qsgd", {}),
    ("terngrad", {}),
]


def _gradients(rank, size, steps):
    found = []
    for name, options in METHODS:
        net = cases.model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        with tw.attach(net, optimizer, name, keep_dense="none", start_compression_step=0, **options) as sync:
            seen = []
            for step in range(steps):
                cases.loss_of(net, rank, step).backward()
                seen.append({n: p.grad.clone() for n, p in net.named_parameters()})
                optimizer.step()  # what is held back counts from here on
                optimizer.zero_grad()
            residuals = {n: r.clone() for n, r in sync.services.state.residuals.items()}
            found.append((seen, sync.stats().bytes_sent, residuals))
    return found


def test_every_method_equals_local_world():
    size, steps = 3, 5
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


def _in_more_groups(rank, size):
    """A rank may be in groups of its own, as for logging."""
    for _ in range(2 * rank):
        dist.new_group([rank], use_local_synchronization=True)
    pair = dist.new_group([0, 2])
    found = [cases.weights(cases.train(rank, 3, "ssgd", attach={"timeout": 20})[0])]
    if rank != 1:
        found.append(
            cases.weights(
                cases.train(rank, 3, "topk", {"density": 0.1}, attach={"timeout": 20, "process_group": pair})[0]
            )
        )
    return found


def test_ranks_that_are_in_different_numbers_of_groups_meet():
    zero, one, two = run(_in_more_groups, 3)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(zero[0], one[0], two[0], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(zero[1], two[1], strict=True))


def _elsewhere(rank, size, method, options):
    """Torch makes new tensors on another device by itself, here on one without memory."""
    found = []
    for device in ("cpu", "meta"):
        net, batches = cases.model(), [cases.batch(rank, step) for step in range(4)]
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        torch.set_default_device(device)
        try:
            with tw.attach(net, optimizer, method, **options) as sync:
                for x, y in batches:
                    cases.down((net(x) - y).square().mean(), optimizer)
                sync.synchronize() if method != "local" else sync.finish()
        finally:
            torch.set_default_device(None)
        found.append(cases.weights(net))
    return found


@pytest.mark.parametrize("method, options", [("powersgd", {"rank": 2}), ("local", {"sync_every": 2}), ("dear", {})])
def test_a_default_device_makes_no_difference(method, options):
    for first, second in run(_elsewhere, 2, method, options):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
