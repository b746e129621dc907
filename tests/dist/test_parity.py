"""What users of DistributedDataParallel expect of a model after ``attach``; see docs/what_differs_from_ddp.md."""

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


# --- copies ---------------------------------------------------------------------------------------------------------


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


def _probes(rank, size):
    """SAM's first pass is dropped, and takes no turn of what alternates; of a closure's passes the last counts."""
    for name, options in RESIDUAL:
        found = []
        for first_pass in (False, True):
            net = cases.model()
            optimizer = _sgd(net)
            with tw.attach(net, optimizer, name, keep_dense="none", **options) as sync:
                for step in range(6):
                    if first_pass:
                        cases.loss_of(net, rank, 50 + step).backward()
                        optimizer.zero_grad()
                    cases.down(cases.loss_of(net, rank, step), optimizer)
                found.append([*sync.services.state.residuals.values(), *cases.weights(net)])
                assert sync.stats().dropped_steps == 6 * first_pass
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), name
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


def _without_a_batch(rank, size):
    """Rank 1 has no batch for some of the steps, and looks ahead by the same way as the others."""
    net = cases.model()
    optimizer = _sgd(net)
    with tw.attach(net, optimizer, "ssgd", look=0.5) as sync:
        for step in range(6):
            if rank == 0 or step % 2:
                with sync.no_sync():
                    cases.loss_of(net, rank, step).backward()
            sync.synchronize()
            optimizer.step()
            optimizer.zero_grad()
    return cases.weights(net)


def test_a_rank_without_a_batch_looks_ahead_too():
    first, second = run(_without_a_batch, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


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


# --- memory of .grad ----------------------------------------------------------------------------------------------


def _kept(rank, size):
    for method, options in [("ssgd", {}), ("cast", {}), *RESIDUAL[1:3]]:
        net, kept = cases.model(), []
        optimizer = _sgd(net)
        with tw.attach(net, optimizer, method, gradient_as_bucket_view=False, **options):
            for step in range(3):
                cases.loss_of(net, rank, step).backward()
                kept += [(p.grad, p.grad.clone()) for p in net.parameters()]
                optimizer.step()
                optimizer.zero_grad()
        assert all(torch.equal(a, b) for a, b in kept), method


def test_gradients_that_a_script_keeps_are_its_own():
    run(_kept, 2)


# --- buffers --------------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """BatchNorm, and a mask that never changes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.register_buffer("mask", torch.ones(100_000))

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


def _two_backwards(rank, size):
    """Forwards before backwards, and a buffer that the module replaces: as DDP, none of it is an error."""
    net = Normed()
    optimizer = _sgd(net)
    with tw.attach(net, optimizer, "ssgd") as sync:
        for step in range(3):
            draw = torch.Generator().manual_seed(9 * step + rank)
            first, second = net(torch.randn(6, 8, generator=draw)), net(torch.randn(6, 8, generator=draw))
            first.square().mean().backward()
            second.square().mean().backward()
            net.mask = torch.ones(10 + 5 * rank + step)
            optimizer.step()
            optimizer.zero_grad()
        assert sync.stats().bytes_sent - sync.stats().dense_bytes < 10_000  # the mask stays where it is
        return net.norm.running_mean.clone(), len(net.mask)


def test_buffers_disturb_no_second_backward_and_may_be_replaced():
    (first, short), (second, long) = run(_two_backwards, 2)
    assert torch.equal(first, second)
    assert (short, long) == (12, 17)


class Odd(nn.Module):
    """Buffers as other people's modules have them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)
        self.register_buffer("mean", torch.zeros(8))
        self.first.register_buffer("same", self.mean)  # one tensor in two places, until one gets another
        self.register_buffer("turned", torch.zeros(2, dtype=torch.complex64).conj())

    def forward(self, x):
        x = self.first(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)  # another tensor takes its place
            self.first.same = self.first.same + 1 + int(x.detach().sum() > 0)
        return self.last(x)


def _odd(rank, size):
    net, twin = Odd(), DistributedDataParallel(Odd())
    optimizers = [_sgd(net), _sgd(twin)]
    with tw.attach(net, optimizers[0], "ssgd"):
        for step in range(4):
            x = torch.randn(6, 8, generator=torch.Generator().manual_seed(9 * step + rank)) + rank
            for m, optimizer in zip((net, twin), optimizers):
                cases.down(m(x).square().mean(), optimizer)
    return [{k: v.clone() for k, v in m.named_buffers()} for m in (net, twin.module)]


def test_buffers_are_equal_by_name_whatever_their_place():
    (first, ddp), (second, _) = run(_odd, 2)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
        assert torch.equal(value, ddp[name]), name  # rank 0's, as DDP leaves them there
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
DECOUPLED = ("acp", {"rank": 1, "start_compression_step": 0, "decoupled": True})
FOUND = [(m, o | {"find_unused_parameters": True}) for m, o in (*RESIDUAL, DECOUPLED)]


@pytest.mark.parametrize(
    ("size", "layout", "listed"),
    [
        (2, None, [*CARRYING, *FOUND]),
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


def _weights(net):
    return torch.nn.utils.parameters_to_vector(net.parameters()).detach().clone()


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
