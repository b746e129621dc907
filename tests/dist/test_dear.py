"""The decoupled schedule on real ranks against its coupled twin, bit for bit."""

import cases
import pytest
import torch

import thinwire as tw
from spawned import run

pytestmark = pytest.mark.dist

PLAN = [["6.bias", "6.weight", "4.bias", "4.weight"], ["2.bias", "2.weight"], ["0.bias", "0.weight"]]


def assert_same(first, *others):
    for other in others:
        torch.testing.assert_close(first, other, rtol=0, atol=0, equal_nan=True)


def everything(net, optimizer):
    state = [torch.as_tensor(x).clone() for _, s in sorted(optimizer.state_dict()["state"].items()) for x in s.values()]
    return [*cases.weights(net), *state]


def everyday(rank, method, *, plan=None, scaled=False, steps=7, adopt=()):
    """Two groups, a schedule of learning rates, clipping, accumulation of three; with a scaler an overflow."""
    net = cases.model()
    slow, fast = [p for p in net.parameters() if p.ndim == 1], [p for p in net.parameters() if p.ndim == 2]
    groups = [{"params": slow, "lr": 0.01, "weight_decay": 0.1}, {"params": fast, "lr": 0.05, "momentum": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled=scaled)
    lossy = not method.exact
    norms, scales = [], []
    with tw.attach(net, optimizer, method, plan=plan, scaler=scaler if lossy else None) as sync:
        for step in range(steps):
            with sync.no_sync():
                for micro in (1, 2):
                    scaler.scale(cases.loss_of(net, rank, 100 * micro + step) / 3).backward()
            loss = cases.loss_of(net, rank, step) / 3
            if scaled and step == 4 and rank == 0:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if not lossy:
                norms.append(sync.clip_grad_norm_(0.2))
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            optimizer.zero_grad()
            schedule.step()
            if step < len(adopt):
                sync.adopt_plan(tw.Plan.of(adopt[step]))
        steps_taken = sync.stats().steps
        residuals = [x for _, x in sorted(sync.services.state.snapshot()["residual"].items())]
        assert sync.stats().rejected_steps == int(lossy and scaled)
    assert steps_taken == steps
    return [*everything(net, optimizer), *norms, *residuals, *map(torch.tensor, scales)]


def _everyday(rank, size):
    plan = tw.Plan.of(PLAN)
    for scaled in (False, True):
        twins = [
            everyday(rank, m, plan=plan, scaled=scaled)
            for m in (tw.SSGD(deterministic=True), tw.DeAR(poison_stale=True))
        ]
        assert_same(*twins)
        factors = {"rank": 2, "min_rate": 1.0, "deterministic": True}
        schedules = [{}, {"decoupled": True}, {"decoupled": True, "update_in_step": True}]
        assert_same(*[everyday(rank, tw.ACP(**factors, **options), scaled=scaled) for options in schedules])
    names = [name for name, _ in cases.model().named_parameters()]
    single, each, odd = [names[::-1]], [[n] for n in reversed(names)], [names[3:], names[:3]]
    changing = everyday(rank, tw.DeAR(fusion="single"), adopt=[each, odd, single, each, single, odd])
    for fusion in ("none", 0.001, 1, 25):
        assert_same(_without_norms(changing), _without_norms(everyday(rank, tw.DeAR(fusion=fusion))))
    return changing


def _without_norms(values):
    """Norms are added up per bucket, so their last bit follows the plan: compare to 1e-6, and the rest exactly."""
    return [x for x in values if x.ndim]


def test_two_groups_a_schedule_clipping_accumulation_and_a_scaler():
    assert_same(*[_without_norms(values) for values in run(_everyday, 3)])


class Halves(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)

    def forward(self, x, *which):
        return sum(getattr(self, name)(x).square().mean() for name in which)


def _refused_and_tried_again(rank, size, refused):
    """One half's deferred gradients are still there when the other half's backward comes: refused, nothing moves."""
    net = Halves()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sync = tw.attach(net, optimizer, "dear", timeout=15)
    x = torch.full((2, 6), 1.0 + rank)
    for step in range(3):
        optimizer.zero_grad()
        if refused and step == 1:
            net(x, "a", "b").backward()
            optimizer.param_groups[0]["params"][0].grad = net.a.bias.grad = None
            with pytest.raises(RuntimeError, match="a second backward on top of deferred gradients"):
                net(x, "a").backward()
            optimizer.zero_grad()
        net(x, "a", "b").backward()
        optimizer.step()
    sync.close()
    return cases.weights(net)


def test_a_backward_that_was_refused_can_be_tried_again():
    refused, plain = run(_refused_and_tried_again, 2, True, fresh=True), run(_refused_and_tried_again, 2, False)
    assert_same(*refused, *plain)
