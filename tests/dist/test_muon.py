"""Muon for the matrices beside AdamW for the rest, as a list of optimizers: exact, local, saved, scaled, prepared."""

from functools import partial

import cases
import pytest
import torch
import torch.distributed as dist

import thinwire as tw
from spawned import run

pytestmark = pytest.mark.dist
STEPS = 8


def both(net):
    """Muon takes hidden matrices only: the last layer is the head."""
    inner = [p for p in list(net.parameters())[:-2] if p.dim() == 2]
    rest = [p for p in net.parameters() if not any(p is one for one in inner)]
    return [torch.optim.Muon(inner, 0.02, 0.1, adjust_lr_fn="match_rms_adamw"), torch.optim.AdamW(rest, lr=0.01)]


def train(net, optimizers, loss, first, last, *, clip=None, schedulers=(), scaler=None):
    for step in range(first, last):
        made = loss(net, step)
        (made if scaler is None else scaler.scale(made)).backward()
        for one in optimizers if scaler is not None and clip else ():
            scaler.unscale_(one)
        if clip is not None:
            clip(1.0)
        for one in optimizers:
            one.step() if scaler is None else scaler.step(one)
            one.zero_grad()
        if scaler is not None:
            scaler.update()
        for one in schedulers:
            one.step()


def falling(optimizers):
    return [torch.optim.lr_scheduler.LambdaLR(one, lambda step: 1 / (1 + step)) for one in optimizers]


def _exact(rank, size):
    def own(net, step):
        return cases.loss_of(net, rank, step, dtype=torch.float64)

    def joint(net, step):
        return sum(cases.loss_of(net, r, step, dtype=torch.float64) for r in range(size)) / size

    apart = []
    for method, scaled in (("ssgd", False), ("ssgd", True), ("dear", False)):
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if scaled else None
        net = cases.model(dtype=torch.float64)
        optimizers = both(net)
        with tw.attach(net, optimizers, method, scaler=scaler) as sync:
            clip = sync.clip_grad_norm_
            train(net, optimizers, own, 0, STEPS, clip=clip, schedulers=falling(optimizers), scaler=scaler)
            sync.synchronize()
        alone = cases.model(dtype=torch.float64)
        optimizers = both(alone)
        clip = partial(torch.nn.utils.clip_grad_norm_, list(alone.parameters()))
        train(alone, optimizers, joint, 0, STEPS, clip=clip, schedulers=falling(optimizers))
        pairs = zip(net.parameters(), alone.parameters(), strict=True)
        apart.append(max(float((a - b).abs().max()) for a, b in pairs))
    return apart


def test_ranks_train_as_one_process_on_all_batches():
    for apart in run(_exact, 2):
        # Newton-Schulz in bf16 rounds gradients that differ in the last bit to different neighbours, if rarely.
        assert max(apart) < 2e-3


def _local(rank, size, folder):
    def job():
        net = cases.model()
        optimizers = both(net)
        return net, optimizers, tw.attach(net, optimizers, "local", sync_every=3, codec="int1", look=0.5)

    def loss(net, step):
        return cases.loss_of(net, rank, step)

    net, optimizers, sync = job()
    train(net, optimizers, loss, 0, 5)
    tw.checkpoint.save(folder, net, optimizers, sync, 5)
    train(net, optimizers, loss, 5, 11)
    through, rounds = [p.detach().clone() for p in net.parameters()], sync.stats().collectives
    sync.finish()
    finished = torch.cat([p.detach().flatten() for p in net.parameters()])
    everyone = [torch.empty_like(finished) for _ in range(size)]
    dist.all_gather(everyone, finished)
    sync.close()
    net, optimizers, sync = job()
    assert tw.checkpoint.load(folder, net, optimizers, sync) == 5
    train(net, optimizers, loss, 5, 11)
    same = all(torch.equal(a, b) for a, b in zip(through, net.parameters(), strict=True))
    sync.close()
    return same, all(torch.equal(everyone[0], other) for other in everyone), rounds


def test_local_steps_go_on_from_a_checkpoint_and_end_equal(tmp_path):
    for same, equal, rounds in run(_local, 2, str(tmp_path)):
        assert same
        assert equal
        assert rounds == {"AllGather": 3}


def _prepared(rank, size):
    accelerate = pytest.importorskip("accelerate")
    from thinwire.adapters.accelerate import register_comm_hook

    accelerator = accelerate.Accelerator(cpu=True)
    net = cases.model()
    net, *optimizers = accelerator.prepare(net, *both(net))
    sync = register_comm_hook(accelerator, net, "local", optimizer=optimizers, sync_every=3, codec="int2", look=0.5)
    before = float(cases.loss_of(net, rank, 0))
    for step in range(12):
        accelerator.backward(cases.loss_of(net, rank, step % 2))
        for one in optimizers:
            one.step()
            one.zero_grad()
    sync.finish()
    return before, float(cases.loss_of(net, rank, 0)), [p.sum().item() for p in net.parameters()]


def test_accelerate_prepares_both():
    pytest.importorskip("accelerate")
    found = run(_prepared, 2)
    assert found[0][2] == found[1][2]
    for before, after, _ in found:
        assert after < 0.9 * before
