"""What users of DistributedDataParallel expect of a model after ``attach``; see docs/what_differs_from_ddp.md."""

import copy
import importlib
import inspect
import io
from datetime import timedelta

import cases
import pytest
import torch
from torch import nn
from torch.nn.functional import embedding
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import thinwire as tw
from spawned import run

pytestmark = pytest.mark.dist

RESIDUAL = [
    ("acp", {"rank": 1, "start_compression_step": 0}),
    ("powersgd", {"rank": 1, "start_compression_step": 0}),
    ("topk", {"density": 0.05, "start_compression_step": 0}),
    ("signsgd", {}),
    ("cast", {"dtype": "int8"}),
]
EXACT = [
    ("ssgd", {}),
    ("ssgd", {"deterministic": True}),
    ("cast", {"dtype": "bf16"}),
    ("cast", {"dtype": "fp16"}),
    ("dear", {}),
]
VIEWS = [("ssgd", {"gradient_as_bucket_view": False}), ("cast", {"gradient_as_bucket_view": False})]
ADAMW = {"lr": 0.1, "weight_decay": 0.1}


def _adamw(net, **options):
    return torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], **(ADAMW | options))


def _sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


# --- frozen ---------------------------------------------------------------------------------------------------------


def _freeze(rank, size):
    """Three steps, then the first layer is frozen: how far it and the others moved in three more."""
    found = {}
    for make in (_adamw, _sgd):
        for method, options in [*EXACT, *RESIDUAL, *VIEWS]:
            net = cases.model()
            optimizer = make(net)
            with tw.attach(net, optimizer, method, **options) as sync:
                for step in range(6):
                    if step == 3:
                        sync.synchronize()
                        net[0].requires_grad_(False)
                        before = [p.detach().clone() for p in net.parameters()]
                    cases.down(cases.loss_of(net, rank, step), optimizer)
                    assert step < 3 or net[0].weight.grad is None
                sync.synchronize()
            moved = [float((p.detach() - old).abs().max()) for p, old in zip(net.parameters(), before)]
            found[make.__name__, method, str(options)] = moved
    return found


def test_a_frozen_parameter_stays():
    for found in run(_freeze, 2):
        for moved in found.values():
            assert moved[:2] == [0.0, 0.0]
            assert min(moved[2:]) > 0


def _freeze_as_ddp(rank, size):
    net, twin = cases.model(), DistributedDataParallel(cases.model(), find_unused_parameters=True)
    optimizers = [_adamw(net), _adamw(twin)]
    worst = 0.0
    with tw.attach(net, optimizers[0], "ssgd"):
        for step in range(6):
            for m, optimizer in zip((net, twin), optimizers):
                if step == 3:
                    (m if m is net else m.module)[0].requires_grad_(False)
                cases.down(cases.loss_of(m, rank, step), optimizer)
            pairs = zip(net.parameters(), twin.parameters())
            worst = max(worst, *(float((a - b).detach().abs().max()) for a, b in pairs))
    return worst


def test_freezing_is_that_of_ddp():
    assert run(_freeze_as_ddp, 2) == [0.0, 0.0]


# --- copies ---------------------------------------------------------------------------------------------------------


def _copies(rank, size):
    for method, options in (("ssgd", {}), ("acp", {"rank": 1}), ("dear", {})):
        net = cases.model()
        optimizer = _sgd(net)
        with tw.attach(net, optimizer, method, **options) as sync:
            cases.walk(net, optimizer, rank, 0, 2)
            sync.synchronize()
            file = io.BytesIO()
            torch.save(net, file)
            file.seek(0)
            copies = [copy.deepcopy(net), AveragedModel(net).module, torch.load(file, weights_only=False)]
            sent = sync.stats().bytes_sent
            for made in copies:
                assert all(torch.equal(a, b) for a, b in zip(net.parameters(), made.parameters()))
                cases.loss_of(made, rank, 5).backward()
                assert made[0].weight.grad is not None
            assert sync.stats().bytes_sent == sent  # nobody averages a copy's gradients
            assert not torch.equal(net[0].weight.new_zeros(1), copies[0][0].weight.grad[:1, :1])
            second = _sgd(copies[0])
            copies[0].zero_grad()
            with tw.attach(copies[0], second, "ssgd"):  # it can be attached itself
                cases.loss_of(copies[0], rank, 6).backward()
            cases.loss_of(net, rank, 2).backward()  # and the first goes on
            assert sync.stats().bytes_sent > sent
            optimizer.step()
            optimizer.zero_grad()
    return b"thinwire" in file.getvalue()


def test_copies_are_not_attached():
    assert run(_copies, 2) == [False, False]


def _hook_pickles(rank, size):
    ddp = DistributedDataParallel(cases.model())
    ddp.register_comm_hook(*tw.ddp_hook("acp", rank=1))
    optimizer = _sgd(ddp)
    cases.walk(ddp, optimizer, rank, 0, 3)
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    made = torch.load(file, weights_only=False)
    assert all(torch.equal(a, b) for a, b in zip(ddp.parameters(), made.parameters()))
    made.register_comm_hook(*tw.ddp_hook("acp", rank=1))
    cases.loss_of(made, rank, 0).backward()
    (_, state) = torch.load(io.BytesIO(_dumped(ddp._comm_hooks)), weights_only=False)[0]
    return state.stats().method


def _dumped(x):
    file = io.BytesIO()
    torch.save(x, file)
    return file.getvalue()


def test_a_ddp_model_with_our_hook_can_be_saved():
    assert run(_hook_pickles, 2) == ["acp", "acp"]


# --- gradients that nobody used -------------------------------------------------------------------------------------


def _discarded(rank, size):
    """A backward whose gradients are dropped, then one whose true gradient is zero: what arrives of the second."""
    found = {}
    for method, options in RESIDUAL:
        net = nn.Linear(16, 16)
        optimizer = _sgd(net)
        with tw.attach(net, optimizer, method, keep_dense="none", **options) as sync:
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(rank))
            net(x).square().mean().backward()
            optimizer.step()
            owed = {n: r.clone() for n, r in sync.services.state.residuals.items()}
            optimizer.zero_grad()
            for _ in range(2):
                net(x).square().mean().backward()
                optimizer.zero_grad()
            (net(x).mean() * 0).backward()
            left = {n: r.clone() for n, r in sync.services.state.residuals.items()}
            optimizer.step()
            found[method, str(options)] = (
                all(torch.equal(owed[n], left[n]) for n in owed),
                sync.stats().dropped_steps,
                any(not torch.equal(owed[n], r) for n, r in sync.services.state.residuals.items()),
            )
    return found


def test_what_was_held_back_of_a_dropped_gradient_is_dropped():
    for found in run(_discarded, 2):
        assert set(found.values()) == {(True, 2, True)}


def _adversarial(rank, size, method, options, skip):
    """DCGAN's loop in small: the generator's backward fills the discriminator's gradients, which zero_grad drops."""
    torch.manual_seed(0)
    judge = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
    of_judge, of_maker = (torch.optim.Adam(net.parameters(), lr=2e-3, betas=(0.5, 0.999)) for net in (judge, maker))
    draw = torch.Generator().manual_seed(rank)
    loss, errors = nn.functional.binary_cross_entropy_with_logits, []
    with tw.attach(judge, of_judge, method, **options) as a, tw.attach(maker, of_maker, method, **options) as b:
        for _ in range(60):
            real, noise = torch.randn(32, 8, generator=draw) + 2, torch.randn(32, 4, generator=draw)
            judge.zero_grad()
            made = maker(noise)
            error = loss(judge(real), torch.ones(32, 1)) + loss(judge(made.detach()), torch.zeros(32, 1))
            error.backward()
            of_judge.step()
            maker.zero_grad()
            if skip:
                with a.no_sync():
                    loss(judge(made), torch.ones(32, 1)).backward()
            else:
                loss(judge(made), torch.ones(32, 1)).backward()
            of_maker.step()
            errors.append(error.item())
        dropped = a.stats().dropped_steps, b.stats().dropped_steps
    return [p.detach().clone() for p in judge.parameters()], sum(errors[-10:]) / 10, dropped


@pytest.mark.parametrize("method", ["acp", "topk"])
def test_a_gan_may_drop_the_generators_pass(method):
    options = {"acp": {"rank": 1, "start_compression_step": 0}, "topk": {"density": 0.1, "start_compression_step": 0}}[
        method
    ]
    written, careful = (run(_adversarial, 2, method, options, skip) for skip in (False, True))
    assert written[0][2] == (59, 0)
    assert careful[0][2] == (0, 0)
    for a, b in zip(written[0][0], written[1][0]):
        assert torch.equal(a, b)
    exact = run(_adversarial, 2, "ssgd", {}, False)
    assert abs(written[0][1] - exact[0][1]) < 0.15


def _probes(rank, size):
    """SAM's first pass is dropped; of a closure's passes the last counts."""
    found = {}
    for first_pass in (False, True):
        net = cases.model()
        optimizer = _sgd(net)
        with tw.attach(net, optimizer, "topk", density=0.05, start_compression_step=0) as sync:
            for step in range(4):
                if first_pass:
                    cases.loss_of(net, rank, 50 + step).backward()
                    optimizer.zero_grad()
                cases.down(cases.loss_of(net, rank, step), optimizer)
            found[first_pass] = [r.clone() for r in sync.services.state.residuals.values()]
    for a, b in zip(found[False], found[True]):
        assert torch.equal(a, b)
    counts = []
    for search in (None, "strong_wolfe"):
        net, log = cases.model(), cases.logged()
        optimizer = torch.optim.LBFGS(net.parameters(), max_iter=4, line_search_fn=search)
        with tw.attach(net, optimizer, "topk", density=0.05, start_compression_step=0) as sync:
            calls = 0

            def closure(net=net, optimizer=optimizer):
                nonlocal calls
                calls += 1
                optimizer.zero_grad()
                loss = cases.loss_of(net, 0, 0)
                loss.backward()
                return loss

            for _ in range(3):
                optimizer.step(closure)
            counts.append((calls, sync.stats().dropped_steps, list(log)))
    return counts


def test_probes_leave_no_trace_and_what_an_inner_step_used_does():
    (all_used, searched), _ = run(_probes, 2)
    assert all_used[0] > 3
    assert all_used[1:] == (0, [])
    assert searched[1] == searched[0] - 3
    assert searched[2] == []


def _reduced_later(rank, size):
    """A step by ``synchronize()``, with and without a dropped backward before it; and one that keeps that backward."""
    found = []
    for probe, kept in ((False, False), (True, False), (True, True)):
        net = cases.model()
        optimizer = _sgd(net)
        with tw.attach(net, optimizer, "topk", density=0.05, start_compression_step=0) as sync:
            for step in range(4):
                if probe and step == 2:
                    cases.loss_of(net, rank, 50).backward()
                    if not kept:
                        optimizer.zero_grad()
                with sync.no_sync():
                    cases.loss_of(net, rank, step).backward()
                sync.synchronize()
                optimizer.step()
                optimizer.zero_grad()
            found.append(([r.clone() for r in sync.services.state.residuals.values()], sync.stats().dropped_steps))
    return found


def test_synchronize_after_a_dropped_backward_owes_nothing_of_it():
    for (never, none), (dropped, one), (kept, still_none) in run(_reduced_later, 2):
        assert (none, one, still_none) == (0, 1, 0)
        assert all(torch.equal(a, b) for a, b in zip(never, dropped))
        assert not all(torch.equal(a, b) for a, b in zip(never, kept))


def _every_second(rank, size, name, options, dropping):
    """Every step is followed by a backward that is dropped, as in a GAN."""
    torch.manual_seed(0)
    net = nn.Linear(32, 32, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    target = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
    with tw.attach(net, optimizer, name, **options) as sync:
        for step in range(150):
            x = torch.randn(64, 32, generator=torch.Generator().manual_seed(2 * step + rank))
            loss = (net(x) - x @ target).square().mean()
            cases.down(loss, optimizer)
            if dropping:
                (-net(x).square().mean()).backward()
                optimizer.zero_grad()
        return loss.item(), sync.stats().dropped_steps, sync.state_dict()["step"]


@pytest.mark.parametrize(("name", "options"), [("acp", {"rank": 4}), ("powersgd", {"rank": 4})])
def test_dropped_passes_take_no_turn_of_what_alternates(name, options):
    (plain, none, _), _ = run(_every_second, 2, name, options, False)
    (dropped, many, steps), _ = run(_every_second, 2, name, options, True)
    assert (none, many, steps) == (0, 148, 300)  # the first was among the exact steps
    assert plain < 1
    assert dropped < 2 * plain + 0.01


def _by_hand(rank, size):
    """Scripts without an optimizer: every method that can."""
    found = {}
    for name, options in [*EXACT[:-1], *RESIDUAL, ("gtopk", {"density": 0.1}), ("dgc", {"density": 0.1}), ("qsgd", {})]:
        net = cases.model()
        with tw.attach(net, None, name, **options) as sync:
            for step in range(8):
                loss = cases.loss_of(net, rank, step % 2)
                loss.backward()
                for p in net.parameters():
                    p.data.add_(p.grad, alpha=-0.05)
                    p.grad = None
                found[name, str(options)] = (loss.item(), sync.stats().dropped_steps)
            assert not sync.services.method.has_residual or sync.services.state.residuals
    with pytest.raises(ValueError, match="dear updates weights during the next forward"):
        tw.attach(cases.model(), None, "dear")
    with pytest.raises(ValueError, match="dear updates weights"):
        tw.attach(cases.model(), method="dear")
    first = cases.loss_of(cases.model(), rank, 1).item()
    return all(loss < first and dropped == 0 for loss, dropped in found.values())


def test_no_optimizer():
    assert run(_by_hand, 2) == [True, True]


def _never_stepped(rank, size):
    """An optimizer is named, but the script updates weights by itself."""
    lines = cases.logged()
    net = cases.model()
    with tw.attach(net, _sgd(net), "topk", density=0.05, start_compression_step=0) as sync:
        for step in range(6):
            cases.loss_of(net, rank, step).backward()
            for p in net.parameters():
                p.data.add_(p.grad, alpha=-0.05)
            net.zero_grad()
        return (
            sync.stats().dropped_steps,
            bool(sync.services.state.residuals),
            [x for x in lines if "optimizer=None" in x],
        )


def test_an_optimizer_that_never_steps_is_told_once():
    first, second = run(_never_stepped, 2)
    assert first[:2] == second[:2] == (3, True)
    assert len(first[2]) == 1


def _twice(rank, size):
    lines = cases.logged()
    net = cases.model()
    optimizer = _sgd(net)
    with tw.attach(net, optimizer, "ssgd"):
        for step in range(4):
            for _ in range(2):  # nanoGPT's accumulation without no_sync
                (cases.loss_of(net, rank, step) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [x for x in lines if "exchanged twice" in x]


def test_a_second_exchange_is_told_once():
    told, quiet = run(_twice, 2)
    assert len(told) == 1
    assert "sync.no_sync()" in told[0]
    assert quiet == []


def _added_up(rank, size):
    """Averages that are added to, though another optimizer has stepped, or a local pass came between."""
    said = []
    net = cases.model()
    often, seldom = (torch.optim.SGD(net[i].parameters(), lr=0.01) for i in (0, 2))
    rest = torch.optim.SGD([p for i in (4, 6) for p in net[i].parameters()], lr=0.01)
    with tw.attach(net, [often, seldom, rest], "topk", density=0.1, start_compression_step=0):
        try:
            for step in range(3):
                cases.loss_of(net, rank, step).backward()
                for optimizer in (often, rest) if step % 2 == 0 else (often, rest, seldom):
                    optimizer.step()
                    optimizer.zero_grad()
        except RuntimeError as error:
            said.append(str(error))
    net = cases.model()
    optimizer = _sgd(net)
    with tw.attach(net, optimizer, "topk", density=0.1, start_compression_step=0) as sync:
        try:
            cases.loss_of(net, rank, 0).backward()
            with sync.no_sync():
                cases.loss_of(net, rank, 1).backward()
            cases.loss_of(net, rank, 2).backward()
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_averages_that_are_added_to_are_told_per_parameter():
    for said in run(_added_up, 2, fresh=True):
        assert ["a second backward on top of averaged gradients" in sentence for sentence in said] == [True, True]


# --- late parameters ------------------------------------------------------------------------------------------------


def _late(rank, size):
    sentences = []
    for change in ("unfrozen", "added", "replaced"):
        net = cases.model()
        if change == "unfrozen":
            net[0].requires_grad_(False)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        if change == "unfrozen":
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with tw.attach(net, optimizer, "ssgd"):
            for step in range(3):
                if step == 2:
                    if change == "unfrozen":
                        net[0].requires_grad_(True)
                    elif change == "added":
                        net.append(nn.Linear(5, 5))
                        optimizer.add_param_group({"params": net[-1].parameters()})
                    else:
                        net[4] = nn.Linear(24, 24)
                before = [p.detach().clone() for p in net.parameters()]
                cases.loss_of(net, rank, step).backward()
                try:
                    optimizer.step()
                except RuntimeError as error:
                    sentences.append(str(error))
                    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters()))
                optimizer.zero_grad()
        with tw.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), "ssgd"):  # as the sentence says
            cases.loss_of(net, rank, 3).backward()
    other = cases.model()
    net = cases.model()
    both = torch.optim.SGD([*net.parameters(), *other.parameters()], lr=0.1)
    with tw.attach(net, both, "ssgd"):  # another model's parameters are not this one's concern
        for step in range(2):
            cases.down(cases.loss_of(net, rank, step) + cases.loss_of(other, rank, step), both)
    return sentences


def test_late_parameters_are_named_before_they_drift():
    for sentences in run(_late, 2):
        assert len(sentences) == 3
        for sentence, name in zip(sentences, ("0.weight, 0.bias", "7.weight, 7.bias", "4.weight, 4.bias")):
            assert sentence.startswith(name)
            assert "close() and attach again" in sentence


# --- memory and strides of .grad ------------------------------------------------------------------------------------


def _kept(rank, size):
    found = {}
    for method, options in [("ssgd", {}), ("cast", {}), *RESIDUAL]:
        net = cases.model()
        optimizer = _sgd(net)
        with tw.attach(net, optimizer, method, gradient_as_bucket_view=False, **options):
            kept = []
            for step in range(3):
                cases.loss_of(net, rank, step).backward()
                kept.append([(p.grad, p.grad.clone()) for p in net.parameters()])
                optimizer.step()
                optimizer.zero_grad()
        found[method, str(options)] = all(torch.equal(a, b) for pairs in kept for a, b in pairs)
    return found


def test_gradients_that_a_script_keeps_are_its_own():
    for found in run(_kept, 2):
        assert all(found.values()), found


def _picture(last):
    torch.manual_seed(2)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))
    return net.to(memory_format=torch.channels_last) if last else net


def _strides(rank, size):
    found = {}
    for method, options in [*EXACT, *RESIDUAL, *VIEWS]:
        weights = []
        for last in (False, True):
            net = _picture(last)
            optimizer = _adamw(net, lr=0.01, fused=True)
            with tw.attach(net, optimizer, method, **options) as sync:
                for step in range(3):
                    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(9 * step + rank))
                    net(x.to(memory_format=torch.channels_last) if last else x).square().mean().backward()
                    if not sync.pending and method != "dear":
                        assert all(p.grad.stride() == p.stride() for p in net.parameters())
                    optimizer.step()
                    optimizer.zero_grad()
                sync.synchronize()
            weights.append([p.detach().clone() for p in net.parameters()])
        if not (method in ("topk", "cast") and "int8" in str(options)) and method not in ("topk", "signsgd"):
            found[method, str(options)] = max(float((a - b).detach().abs().max()) for a, b in zip(*weights))
    return found


def test_gradients_have_their_parameters_strides():
    for found in run(_strides, 2):
        assert max(found.values()) < 2e-3, found  # one step of Adam moves 0.01; wrong elements differ by several


# --- buffers --------------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """BatchNorm, a mask that never changes, and a dtype that Gloo does not know."""

    def __init__(self, small=True):
        super().__init__()
        torch.manual_seed(4)
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.register_buffer("mask", torch.ones(100_000))
        if small:
            self.register_buffer("small", torch.zeros(4).to(torch.float8_e4m3fn))

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


def _statistics(rank, size):
    found = {}
    for followed in (True, False):
        net = Normed()
        twin = DistributedDataParallel(Normed(small=False), broadcast_buffers=followed)
        net.small.copy_(torch.full((4,), float(rank)))
        optimizers = [_sgd(net), _sgd(twin)]
        with tw.attach(net, optimizers[0], "ssgd", broadcast_buffers=followed) as sync:
            assert float(net.small.float().sum()) == 0
            for step in range(4):
                x = torch.randn(6, 8, generator=torch.Generator().manual_seed(9 * step + rank)) + rank
                for m, optimizer in zip((net, twin), optimizers):
                    cases.down(m(x).square().mean(), optimizer)
            sent = sync.stats().bytes_sent - sync.stats().dense_bytes
        found[followed] = {k: v.clone() for k, v in net.state_dict().items() if "norm.running" in k}
        found[followed, "ddp"] = {k: v.clone() for k, v in twin.module.state_dict().items() if "norm.running" in k}
        assert sent < 10_000  # the mask stays where it is
    return found


def test_statistics_are_rank_0s_as_under_ddp():
    first, second = run(_statistics, 2)
    for name, value in first[True].items():
        assert torch.equal(value, second[True][name])
        assert torch.equal(value, first[True, "ddp"][name])
        assert not torch.equal(first[False][name], second[False][name])
        assert torch.equal(second[False][name], second[False, "ddp"][name])


def _two_backwards(rank, size):
    """Forwards before backwards, and a buffer that the module replaces: as DDP, none of it is an error."""
    net = Normed()
    optimizer = _sgd(net)
    with tw.attach(net, optimizer, "ssgd"):
        for step in range(3):
            draw = torch.Generator().manual_seed(9 * step + rank)
            first, second = net(torch.randn(6, 8, generator=draw)), net(torch.randn(6, 8, generator=draw))
            first.square().mean().backward()
            second.square().mean().backward()
            net.mask = torch.ones(10 + 5 * rank + step)
            optimizer.step()
            optimizer.zero_grad()
        return net.norm.running_mean.clone(), len(net.mask)


def test_buffers_disturb_no_second_backward_and_may_be_replaced():
    (first, short), (second, long) = run(_two_backwards, 2)
    assert torch.equal(first, second)
    assert (short, long) == (12, 17)


class Odd(nn.Module):
    """Buffers as other people's modules have them."""

    def __init__(self, expanded=True):
        super().__init__()
        torch.manual_seed(4)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)
        self.register_buffer("flag", torch.zeros(1, dtype=torch.uint8))  # what comes after it is not aligned
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("big", torch.tensor(2**60))
        self.register_buffer("done", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("coarse", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("mask", torch.full((4, 4), -torch.inf))
        self.register_buffer("wide", torch.zeros(1).expand(5) if expanded else torch.zeros(5))
        self.first.register_buffer("same", self.mean)  # one tensor in two places, until one gets another
        self.register_buffer("turned", torch.zeros(2, dtype=torch.complex64).conj())

    def forward(self, x):
        x = self.first(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)  # another tensor takes its place
            self.first.same = self.first.same + 1 + int(x.detach().sum() > 0)
            self.count += 1 + int(x.detach().sum() > 0)
            self.big = self.big + 1 + int(x.detach().sum() > 0)
            self.flag.fill_(1)
            self.done[int(self.count) % 3] = True
            self.coarse.copy_(x.detach().mean(0)[:3])
        return self.last(x)


def _odd(rank, size):
    net = Odd()
    if rank:
        net.wide, net.mask = torch.ones(1).expand(5), torch.zeros(4, 4)
    twin = DistributedDataParallel(Odd(expanded=False))
    optimizers = [_sgd(net), _sgd(twin)]
    with tw.attach(net, optimizers[0], "ssgd"):
        for step in range(4):
            x = torch.randn(6, 8, generator=torch.Generator().manual_seed(9 * step + rank)) + rank
            for m, optimizer in zip((net, twin), optimizers):
                cases.down(m(x).square().mean(), optimizer)
    return [{k: v.clone() for k, v in m.named_buffers()} for m in (net, twin.module)]


def test_buffers_are_equal_by_name_whatever_their_dtype_place_and_alignment():
    (first, ddp), (second, _) = run(_odd, 2)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
        assert torch.equal(value, ddp[name]), name  # rank 0's, as DDP leaves them there
    assert int(first["big"]) > 2**60 + 3
    assert first["mean"].any()


def _ignoring(rank, size):
    said = []
    for how in ("ours", "ddp's"):
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        net.register_buffer("own", torch.full((2 + rank,), float(rank)))  # another shape on each rank
        net.register_buffer("table", torch.eye(3).to_sparse())
        with torch.no_grad():
            net[1].bias.fill_(float(rank))
        names, optimizer = ["own", "table", "1.bias"], torch.optim.SGD(net.parameters(), lr=0.1)
        said += [cases.said(lambda n=net, o=optimizer, k=k: tw.attach(n, o, ignore=k)) for k in (["own"], ["owm"])]
        vars(net).update(_ddp_params_and_buffers_to_ignore=names if how == "ddp's" else [])
        with tw.attach(net, optimizer, **({"ignore": names} if how == "ours" else {})):
            for step in range(2):
                cases.down(net(torch.full((3, 4), 1.0 + rank + step)).square().mean(), optimizer)
        said.append((net.own.tolist(), float(net[1].bias[0]), net[0].weight.detach().clone()))
    return said


def test_what_is_ignored_is_each_ranks_own():
    first, second = run(_ignoring, 2)
    for k in (0, 3):
        assert "the buffer table (torch.sparse_coo, torch.float32, on cpu) cannot be sent" in first[k]
        assert "the model has no parameter or buffer 'owm'" in first[k + 1]
        (own, bias, weight), (others, theirs, same) = first[k + 2], second[k + 2]
        assert (own, others) == ([0.0, 0.0], [1.0, 1.0, 1.0])
        assert bias != theirs
        assert torch.equal(weight, same)


def _other_dtypes(rank, size):
    said = []
    for what in ("buffer", "frozen"):
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        dtype = torch.float16 if rank else torch.bfloat16
        net[0].requires_grad_(False)
        if what == "buffer":
            net.register_buffer("mean", torch.ones(3, dtype=dtype))
        else:
            net[0].to(dtype)
        said.append(cases.said(lambda n=net: tw.attach(n, torch.optim.SGD(n[1].parameters(), lr=0.1))))
    return said


def test_a_dtype_that_differs_between_ranks_is_named():
    for buffer, frozen in run(_other_dtypes, 2):
        assert "mean [3] torch.bfloat16 against mean [3] torch.float16" in buffer
        assert "0.weight [4, 4] torch.bfloat16 against 0.weight [4, 4] torch.float16" in frozen


def _two_exchanges(rank, size):
    class Task(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, x):
            return self.net(x)

    said = []
    wrapped = Task(DistributedDataParallel(cases.model()))
    compiled = torch.compile(DistributedDataParallel(cases.model()), backend="eager")
    for net in (wrapped, compiled):
        said.append(cases.said(lambda n=net: tw.attach(n, _sgd(n))))
    whole = Task(cases.model())
    with tw.attach(whole, _sgd(whole)):
        said.append(cases.said(lambda: tw.attach(whole.net, _sgd(whole))))
    part = cases.model()
    with tw.attach(part, _sgd(part)):
        said.append(cases.said(lambda: tw.attach(Task(part), _sgd(part))))
    around = cases.model()
    with tw.attach(around, _sgd(around)):
        ddp = DistributedDataParallel(around)
        said.append(cases.said(lambda: cases.loss_of(ddp, rank, 0)))
    cases.loss_of(ddp, rank, 0).backward()
    later = []
    for how in ("a part", "a hook", "replicate"):
        net = cases.model()
        with tw.attach(net, _sgd(net)):
            called = net
            if how == "a part":
                net[0] = DistributedDataParallel(net[0])
            elif how == "a hook":
                called = DistributedDataParallel(net)
                called.register_comm_hook(*tw.ddp_hook("ssgd"))
            else:
                importlib.import_module("torch.distributed._composable").replicate(net)
            later.append(cases.said(lambda n=called: cases.loss_of(n, rank, 0)))
    return [*said, later]


def test_two_exchanges_for_one_model_are_refused():
    for inside, compiled, part, whole, around, later in run(_two_exchanges, 2, fresh=True):
        assert inside.startswith("TypeError: its module net is wrapped in DistributedDataParallel")
        assert compiled.startswith("TypeError: its module _orig_mod is wrapped in DistributedDataParallel")
        assert "belongs to a model that is attached already" in part
        assert "its module net is attached already" in whole
        for said in (around, *later):
            assert "DistributedDataParallel around it or a part of it exchanges the gradients again" in said


# --- the user's modes -----------------------------------------------------------------------------------------------


def _under_autocast(rank, size):
    """Backward inside autocast, against outside: the forward is the same, so must the bits of the exchange be."""
    found = {}
    for name, options in (
        ("acp", {"rank": 2, "min_rate": 1.0}),
        ("powersgd", {"rank": 2, "min_rate": 1.0}),
        ("acp", {"rank": 2, "min_rate": 1.0, "decoupled": True}),
        ("acp", {"rank": 2, "min_rate": 1.0, "error_feedback": False}),
        ("topk", {"density": 0.1}),
    ):
        weights = []
        for inside in (True, False):
            net = cases.model()
            optimizer = _sgd(net)
            with tw.attach(net, optimizer, name, start_compression_step=0, **options) as sync:
                for step in range(4):
                    with torch.autocast("cpu", torch.bfloat16):
                        loss = cases.loss_of(net, rank, step)
                        if inside:
                            loss.backward()
                            optimizer.step()
                    if not inside:
                        loss.backward()
                        optimizer.step()
                    optimizer.zero_grad()
                sync.synchronize()
                weights.append(_weights(net))
        found[f"{name} {options}"] = torch.equal(*weights)
    return found


def test_the_exchange_computes_alike_whether_backward_is_in_autocast():
    for found in run(_under_autocast, 2):
        assert all(found.values()), found


def _validated(rank, size):
    """A validation under inference_mode after the first step: pending updates make the optimizer state there."""
    found = {}
    for name, options in (("dear", {}), ("cast", {"dtype": "bf16", "decoupled": True}), ("ssgd", {})):
        weights = []
        for mode in (torch.inference_mode, torch.no_grad):
            net = cases.model()
            optimizer = _adamw(net)
            with tw.attach(net, optimizer, name, **options) as sync:
                for step in range(4):
                    cases.down(cases.loss_of(net, rank, step), optimizer)
                    with mode():
                        net.eval()
                        cases.loss_of(net, rank, step)
                        net.train()
                sync.synchronize()
                weights.append(_weights(net))
        found[name] = torch.equal(*weights)
    return found


def test_a_validation_under_inference_mode_leaves_training_as_it_is():
    for found in run(_validated, 2):
        assert all(found.values()), found


# --- gradients that no backward has made ----------------------------------------------------------------------------


def _per_sample(rank, size):
    """Gradients per sample, derivatives and an export right after a step, whose updates the decoupled schedule owes."""
    found = {}
    for name in ("dear", "ssgd"):
        net = cases.model()
        optimizer = _sgd(net)
        x, _ = cases.batch(rank, 9)
        with tw.attach(net, optimizer, name) as sync:
            for step, look in enumerate(("vmap", "grad", "jvp", "export")):
                cases.down(cases.loss_of(net, rank, step), optimizer)
                if look == "vmap":
                    torch.func.vmap(net)(x)
                elif look == "grad":
                    torch.func.grad(lambda x, net=net: net(x).square().mean())(x)
                elif look == "jvp":
                    torch.func.jvp(net, (x,), (torch.ones_like(x),))
                else:
                    torch.export.export(net, (x,))
            sync.synchronize()
            found[name] = _weights(net)
    return torch.equal(found["dear"], found["ssgd"])


def test_pending_updates_are_made_outside_of_torchs_transforms():
    assert run(_per_sample, 2) == [True, True]


def _made_by_hand(rank, size):
    found = {}
    for name, options in (("ssgd", {}), ("topk", {"density": 0.1}), ("dear", {})):
        for told in (False, True):
            net = cases.model()
            optimizer = _sgd(net)
            start = _weights(net)
            with tw.attach(net, optimizer, name, **options) as sync:
                said = ""
                for step in range(3):
                    loss = cases.loss_of(net, rank, step)
                    for p, g in zip(net.parameters(), torch.autograd.grad(loss, list(net.parameters()))):
                        p.grad = g
                    if told:
                        sync.synchronize()
                    said = said or cases.said(optimizer.step)
                    optimizer.zero_grad()
                sync.synchronize()
                found[name, told] = said, sync.stats().steps, bool(torch.equal(start, _weights(net))), _weights(net)
    return found


def test_gradients_made_by_hand_are_averaged_when_asked_and_refused_before_they_are_used():
    first, second = run(_made_by_hand, 2)
    for (name, told), (said, steps, same, weights) in first.items():
        assert torch.equal(weights, second[name, told][3]), name
        if told:
            assert (said, steps, same) == ("", 3, False), name
        else:
            assert "no backward has made" in said
            assert same


# --- the loss scale -------------------------------------------------------------------------------------------------


def _scaled(rank, size):
    found = {}
    for handed in (True, False):
        lines = cases.logged()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        net = cases.model()
        optimizer = _sgd(net)
        with tw.attach(
            net, optimizer, "topk", density=0.05, start_compression_step=0, scaler=scaler if handed else None
        ) as sync:
            for step in range(4):
                scaler.scale(cases.loss_of(net, rank, step)).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            found[handed] = [r.clone() for r in sync.services.state.residuals.values()]
            assert sync.services.scaler is scaler
    return found, [x for x in lines if "GradScaler" in x]


def test_a_grad_scaler_is_found():
    for found, lines in run(_scaled, 2):
        assert len(lines) == 1
        for a, b in zip(found[True], found[False]):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)


def _resumed_with_a_scale(rank, size):
    def made(**options):
        net, scaler = cases.model(), torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = _sgd(net)
        options = {"density": 0.05, "start_compression_step": 0} | options
        return net, scaler, optimizer, tw.attach(net, optimizer, "topk", **options)

    net, scaler, optimizer, sync = made()
    for step in range(3):
        scaler.scale(cases.loss_of(net, rank, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    state = sync.state_dict()
    sync.close()
    *_, sync = made()
    with sync, pytest.raises(ValueError, match=r"saved with a GradScaler in use.*scaler="):
        sync.load_state_dict(state)
    *_, sync = made(scaler=scaler)
    with sync:
        sync.load_state_dict(state)
    return state["scaled"]


def test_a_state_with_a_loss_scale_wants_its_scaler():
    assert run(_resumed_with_a_scale, 2) == [True, True]


# --- unused parameters ----------------------------------------------------------------------------------------------


class Uneven(nn.Module):
    """One layer is used nowhere; on rank 1 only: one, one whose gradients are -0.0, one whose are so in 16 bits."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        names = ("first", "never", "sometimes", "negative", "tiny", "last")
        for name in names:
            self.add_module(name, nn.Linear(24, 24))

    def forward(self, x, rank):
        y = self.last(self.first(x)).square().mean()
        if rank == 1:
            y = y + self.sometimes(x).mean() + -0.0 * self.negative(x).abs().sum()
            y = y + -1e-30 * self.tiny(x.abs()).sum() - 1e-42 * self.tiny(x.abs()).sum()
        return y


def _unused(rank, size, topology, listed):
    found = {}
    for method, options in listed:
        net = Uneven()
        optimizer = _adamw(net)
        start = {n: p.detach().clone() for n, p in net.named_parameters()}
        with tw.attach(net, optimizer, method, topology=topology, **options) as sync:
            for step in range(3):
                x = torch.randn(4, 24, generator=torch.Generator().manual_seed(9 * step + rank))
                cases.down(net(x, rank), optimizer)
            sync.synchronize()
        moved = {n: float((p.detach() - start[n]).abs().max()) for n, p in net.named_parameters()}
        found[method, str(options)] = moved, {n: p.detach().clone() for n, p in net.named_parameters()}
    return found


CARRYING = [
    *EXACT,
    *VIEWS,
    ("ssgd", {"fusion": "none"}),
    ("dear", {"fusion": "none"}),
    ("dear", {"check_finite": False}),
]
FOUND = [(m, o | {"find_unused_parameters": True}) for m, o in RESIDUAL]


@pytest.mark.parametrize(
    ("size", "layout", "listed"),
    [
        (2, None, [*CARRYING, *FOUND]),
        (3, None, CARRYING[:5]),
        (4, (4, 2), [("ssgd", {"collective": "torus"}), ("ssgd", {"collective": "three_phase"}), ("dear", {})]),
    ],
)
def test_what_no_rank_used_stays_as_it_is(size, layout, listed):
    results = run(_unused, size, layout and tw.Topology(*layout), listed)
    for key, (moved, weights) in results[0].items():
        assert moved["never.weight"] == moved["never.bias"] == 0.0, key
        assert min(v for n, v in moved.items() if "never" not in n) > 0, key  # decayed, at least
        for other in results[1:]:
            for name, value in weights.items():
                assert torch.equal(value, other[key][1][name]), (key, name)


def _warned(rank, size, told):
    lines = cases.logged()
    net = Uneven()
    with tw.attach(net, _adamw(net), "topk", density=0.1, start_compression_step=0) as sync:
        for _ in range(2):
            if told:
                sync.services.expect([name for name, _ in net.named_parameters() if "never" not in name])
            net(torch.ones(2, 24), rank).backward()
            net.zero_grad()
    return [x for x in lines if "find_unused_parameters" in x]


def test_a_method_that_cannot_tell_says_so_once():
    for lines in run(_warned, 2, False):
        assert len(lines) == 1
        assert ".weight had no gradient on rank" in lines[0]


def test_who_has_said_what_is_used_is_not_told_of_the_rest():
    assert run(_warned, 2, True) == [[], []]


# --- sentences ------------------------------------------------------------------------------------------------------


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Parameter(torch.ones(8, 4)), nn.Linear(4, 1)

    def forward(self, x):
        return self.last(embedding(x, self.table, sparse=True)).mean()


def _sentences(rank, size):
    found = []
    net = Sparse()
    with tw.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), "ssgd"), pytest.raises(TypeError) as caught:
        net(torch.tensor([1, 2])).backward()
    found.append(str(caught.value))
    net = cases.model()
    with tw.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), "ssgd"):
        net.double()
        with pytest.raises(RuntimeError) as caught:
            cases.loss_of(net, rank, 0, dtype=torch.float64).backward()
    found.append(str(caught.value))
    net = cases.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with tw.attach(net, optimizer, "ssgd"):
        net[-1].weight.register_post_accumulate_grad_hook(lambda p: optimizer.step())
        with pytest.raises(RuntimeError) as caught:
            cases.loss_of(net, rank, 0).backward()
    found.append(str(caught.value))
    return found


def test_sentences():
    for sparse, double, inside in run(_sentences, 2):
        assert "table received a sparse gradient" in sparse
        assert "0.weight is torch.float64 on cpu now, but was torch.float32" in double
        assert "optimizer.step() in the middle of the exchange" in inside


# --- the first steps ---------------------------------------------------------------------------------------

STARTS = [
    ("acp", {"rank": 1}),
    ("powersgd", {"rank": 1}),
    ("acp", {"rank": 1, "decoupled": True, "update_in_step": True}),
    *((name, {"density": 0.1}) for name in ("topk", "gtopk", "oktopk", "omgs")),
    ("hitopk", {"density": 0.1, "topology": tw.Topology(2)}),
    ("signsgd", {}),
    ("cast", {"dtype": "int8"}),
]


def _weights(net):
    return torch.nn.utils.parameters_to_vector(net.parameters()).detach().clone()


def _starts(rank, size):
    """Per method and start: how far each of five steps is from that under exact averages, over its length."""
    found = {}
    for name, options in STARTS:
        for start in (None, 0, 3):
            nets = [cases.model(), cases.model()]
            optimizers = [_sgd(net) for net in nets]
            apart = []
            with (
                tw.attach(nets[0], optimizers[0], "ssgd", fusion="none"),
                tw.attach(nets[1], optimizers[1], name, start_compression_step=start, **options) as sync,
            ):
                for step in range(5):
                    before = _weights(nets[0])
                    nets[1].load_state_dict(nets[0].state_dict())
                    for net, optimizer in zip(nets, optimizers):
                        cases.down(cases.loss_of(net, rank, step), optimizer)
                    sync.synchronize()
                    right = _weights(nets[0])
                    apart.append(float((_weights(nets[1]) - right).norm() / (right - before).norm()))
            found[name, str(options), start] = apart
    return found


def test_low_rank_and_topk_begin_with_two_steps_of_eight_bits():
    for found in run(_starts, 2):
        for (name, options, start), apart in found.items():
            if start is not None:
                assert max(apart[:start], default=0.0) < 1e-4, (name, start)
            elif name not in ("signsgd", "cast"):
                start = 2
                rounded = "decoupled" not in options
                assert 1e-3 * rounded <= max(apart[:2]) < 0.04, name
            assert min(apart[start or 0 :]) > 1e-3, (name, start)


# --- options of DDP and its groups that a hook meets ----------------------------------------------------------------


def _left_out(rank, size):
    """torch 2.13 lets DDP skip buckets in which nothing was used."""
    torch.manual_seed(0)
    net = nn.Module()
    net.used, net.unused = nn.Linear(100, 5000, bias=False), nn.Linear(100, 100, bias=False)
    options = {"find_unused_parameters": True, "bucket_cap_mb": 1.5, "skip_all_reduce_unused_params": True}
    net.forward = lambda x: net.used(x).square().mean()
    ddp = DistributedDataParallel(net, **options)
    ddp.register_comm_hook(*tw.ddp_hook("ssgd", timeout=20))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    try:
        for _ in range(5):
            cases.down(ddp(torch.ones(2, 100)), optimizer)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.skipif(
    "skip_all_reduce_unused_params" not in inspect.signature(DistributedDataParallel).parameters,
    reason="this torch's DDP has no skip_all_reduce_unused_params",
)
def test_ddp_that_skips_buckets_is_told():
    for said in run(_left_out, 2, fresh=True, seconds=120):
        assert "skip_all_reduce_unused_params" in said


def _limit_of_the_group(rank, size):
    group = torch.distributed.new_group(list(range(size)), timeout=timedelta(seconds=41))
    net = cases.model()
    with (
        tw.attach(net, None, "ssgd", process_group=group) as ours,
        tw.attach(cases.model(), None, "ssgd", timeout=7) as theirs,
    ):
        return [sync.services.session.comm.timeout.total_seconds() for sync in (ours, theirs)]


def test_the_limit_is_that_of_the_group():
    assert run(_limit_of_the_group, 2) == [[41.0, 7.0]] * 2


def _wider_gradients(rank, size):
    """bf16 weights whose gradients are fp32, by ``grad_dtype``; beside plain ones."""
    found = {}
    for name, options in (("ssgd", {}), ("topk", {"density": 1.0}), ("dear", {}), ("cast", {"dtype": "int8"})):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        net[0].to(torch.bfloat16)
        for p in net[0].parameters():
            p.grad_dtype = torch.float32
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        with tw.attach(net, optimizer, name, start_compression_step=0, **options) as sync:
            x = torch.full((3, 8), 1.0 + rank)
            net[1](net[0](x.bfloat16()).float()).square().mean().backward()
            norm = float(sync.clip_grad_norm_(1e9))
            if name != "dear":
                found[name] = [p.grad.dtype for p in net.parameters()], norm, net[0].weight.grad.clone()
            optimizer.step()
            sync.synchronize()
            found[name, "norm"] = norm
    return found


def test_gradients_may_be_wider_than_their_weights():
    first, second = run(_wider_gradients, 2)
    for name in ("ssgd", "topk", "cast"):
        dtypes, norm, gradient = first[name]
        assert set(dtypes) == {torch.float32}
        assert torch.equal(gradient, second[name][2])
        assert norm == pytest.approx(first["dear", "norm"], rel=1e-2)
    torch.testing.assert_close(first["ssgd"][2], first["topk"][2])


def _thawed(rank, size):
    """A layer that is frozen for some steps, as a GAN's discriminator is: what it is owed waits, and is not sent."""
    found = []
    low = {"rank": 2, "min_rate": 1.0}
    for name, options in (("topk", {"density": 0.1}), ("acp", low), ("acp", {**low, "decoupled": True})):
        net = cases.model()
        optimizer = _sgd(net)
        with tw.attach(net, optimizer, name, start_compression_step=0, **options) as sync:
            owed, norms, same = sync.services.state.residuals, [], []
            for step in range(7):
                net[0].requires_grad_(step not in (3, 4))
                before = owed["0.weight"].clone() if step else None
                cases.loss_of(net, rank, step).backward()
                norms.append(float(sync.clip_grad_norm_(1e9)))
                optimizer.step()
                optimizer.zero_grad()
                sync.synchronize()
                same.append(before is not None and torch.equal(before, owed["0.weight"]))
        found.append((same, norms))
    return found


def test_what_a_frozen_parameter_is_owed_waits_until_it_is_thawed():
    for found in run(_thawed, 2):
        for same, _ in found:
            assert same == [False, False, False, True, True, False, False]
        assert found[1][1] == pytest.approx(found[2][1], rel=1e-5)
