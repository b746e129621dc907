"""The whole of KFAC in one process: closed forms, the clip, damping, the model's own Fisher, what is refused."""

import inspect
import logging

import pytest
import torch
from layers_by_hand import both_damped, dense_solve, mlp
from torch import nn
from torch.utils.checkpoint import checkpoint

import thinwire as tw
from kfac_with import kfac_with
from thinwire.core.kernels.symmetric import pack_upper, unpack_upper
from thinwire.systems.kfac import KFAC, Variant, inversion, stepped
from thinwire.systems.kfac.capture import sampled_loss
from thinwire.tools.bench.models.registry import build_model

EVERY = {"factor_update_steps": 1, "inv_update_steps": 1}


def made(net, lr=1.0, **options):
    optimizer = torch.optim.SGD(net.parameters(), lr)
    return kfac_with(net, None, optimizer=optimizer, **{"damping": 0.1, "kl_clip": None, **EVERY, **options}), optimizer


def factor(kfac, name):
    return unpack_upper(kfac.state_dict()[f"factor/{name}"])


def inverses(kfac):
    return {key: value for key, value in kfac.state_dict().items() if key.startswith("inverse/")}


def gradients(net):
    """Of each layer, by its name: weight and bias side by side, as the closed forms have them."""
    return {
        name: torch.cat([p.grad.flatten(1) if p.dim() > 1 else p.grad[:, None] for p in layer.parameters()], 1)
        for name, layer in net.named_modules()
        if isinstance(layer, nn.Linear | nn.Conv2d)
    }


def regression(seed=0, n=32):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=draw).double()
    return x, torch.randn(n, 3, generator=draw).double()


def moment(x):
    """A of the reference scaling."""
    ones = torch.cat([x.detach(), x.new_ones(len(x), 1)], 1)
    return ones.mT @ ones / len(x)


def half_squares(out, y):
    return 0.5 * (out - y).square().sum() / len(y)


@pytest.mark.parametrize("method", ["inverse", "eigen"])
@pytest.mark.parametrize("value", [-0.1, torch.nan])  # -0.1 and the damping are zero: LAPACK refuses the whole batch
def test_a_factor_that_cannot_be_inverted_spoils_no_other_of_its_shape(method, value):
    found = []
    for spoilt in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Linear(5, 5) for _ in range(3)]).double()
        kfac, optimizer = made(net, method=method, factor_update_steps=lambda step: 100)
        for step in range(2):
            net(regression(step)[0]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                before = kfac.state_dict()
                if spoilt:
                    before["factor/1/A"] = pack_upper(torch.eye(6).double() * value)
                kfac.load_state_dict(before)
        found.append((inverses(kfac), kfac.stats().levels))
    (sound, none), (others, levels) = found
    assert (none, levels.keys()) == ({}, {"1/A"} if method == "inverse" or value != value else set())
    sound.pop("inverse/1/A"), others.pop("inverse/1/A")
    torch.testing.assert_close(others, sound, rtol=1e-9, atol=1e-9)


def test_one_step_of_linear_regression_is_least_squares(monkeypatch):
    """G of a Gaussian output is the identity: unit vectors in place of the noise make it exactly that."""
    x, y = regression(n=33)

    def units(outputs, distribution, generator):
        noise = 3**0.5 * torch.eye(3).double().repeat(11, 1)
        return half_squares(outputs, outputs.detach() + noise)

    monkeypatch.setattr("thinwire.systems.kfac.kfac.sampled_loss", units)
    net = nn.Linear(5, 3).double()
    kfac, optimizer = made(net, fisher="sampled", damping=1e-13)
    out = net(x)
    kfac.fisher_backward(out, "gaussian")
    half_squares(out, y).backward()
    optimizer.step()
    torch.testing.assert_close(factor(kfac, "/G"), torch.eye(3).double(), rtol=0, atol=1e-12)
    ones = torch.cat([x, torch.ones(33, 1).double()], 1)
    solved = torch.linalg.lstsq(ones, y).solution.mT
    torch.testing.assert_close(net.weight, solved[:, :5], rtol=0, atol=1e-10)
    torch.testing.assert_close(net.bias, solved[:, 5], rtol=0, atol=1e-10)


@pytest.mark.parametrize("method", ["inverse", "inverse_pi", "eigen"])
@pytest.mark.parametrize("make", [
    lambda: nn.Sequential(nn.Conv2d(1, 2, 2, 2, 1), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(18, 3)),
    lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 4, bias=False), nn.Tanh(), nn.Linear(4, 3)),
])  # fmt: skip
def test_v_is_the_dense_solve(method, make):
    torch.manual_seed(1)
    net = make().double()
    x, y = torch.randn(6, 1, 4, 4).double(), torch.randn(6, 3).double()
    kfac, optimizer = made(net, lr=0.0, method=method, damping=0.07)
    half_squares(net(x), y).backward()
    before = gradients(net)
    assert kfac.stats().factor_updates == 0  # nothing is taken in before the step
    optimizer.step()
    after = gradients(net)
    assert len(after) == 2
    for name, gradient in before.items():
        a, g = factor(kfac, f"{name}/A"), factor(kfac, f"{name}/G")
        if method == "eigen":
            wanted = dense_solve(a, g, gradient, 0.07)
        else:
            pi = ((a.trace() / len(a)) / (g.trace() / len(g))).sqrt() if method == "inverse_pi" else None
            pair = (0.07, 0.07) if pi is None else (pi * 0.07**0.5, 0.07**0.5 / pi)
            wanted = both_damped(a, g, gradient, *pair)
        torch.testing.assert_close(after[name], wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("method", ["inverse", "inverse_pi", "eigen"])
def test_factors_of_one_shape_are_inverted_in_one_call(method, monkeypatch):
    asked = []
    name = "eigh" if method == "eigen" else "cholesky_ex"
    real = getattr(torch.linalg, name)
    monkeypatch.setattr(torch.linalg, name, lambda x: asked.append(tuple(x.shape)) or real(x))
    found, calls = [], []
    for together in (1 << 22, 1):
        monkeypatch.setattr(inversion, "TOGETHER", together)
        torch.manual_seed(0)
        net = mlp(6, 6, 6, 6, 3)
        kfac, optimizer = made(net, method=method)
        half_squares(net(torch.randn(20, 6).double()), torch.zeros(20, 3)).backward()
        optimizer.step()
        found.append((inverses(kfac), gradients(net)))
        calls.append(sorted(asked))
        asked.clear()
    assert calls == [[(1, 3, 3), (3, 6, 6), (4, 7, 7)], [(1, 3, 3), *[(1, 6, 6)] * 3, *[(1, 7, 7)] * 4]]
    for one, other in zip(*found):
        assert one.keys() == other.keys()
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=1e-12, atol=1e-12)


def test_inverting_leaves_the_factors_alone():
    """Published code adds the damping to the stored factor; here only new statistics change it."""
    net, (x, y) = mlp(5, 4, 3), regression()
    kfac, optimizer = made(net, factor_update_steps=4, inv_update_steps=4, factor_decay=0.95)
    seen = []
    for _ in range(4):
        half_squares(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append({key: value for key, value in kfac.state_dict().items() if key.startswith("factor/")})
    assert len(seen[0]) == len(inverses(kfac)) == 4
    for later in seen[1:]:
        assert all(torch.equal(later[name], first) for name, first in seen[0].items())
    torch.testing.assert_close(unpack_upper(seen[0]["factor/0/A"]), moment(x), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("decay, weights", [
    (0.0, (0, 0, 1)), (1.0, (1, 0, 0)), (0.5, (0.25, 0.25, 0.5)), ("warmup", (1 / 3, 1 / 3, 1 / 3)),
])  # fmt: skip
def test_running_averages(decay, weights):
    net = mlp(5, 3)
    kfac, optimizer = made(net, lr=0.0, factor_decay=decay)
    moments = []
    for seed in range(3):
        x, y = regression(seed)
        half_squares(net(x), y).backward()
        optimizer.step()
        moments.append(moment(x))
    wanted = sum(w * m for w, m in zip(weights, moments))
    torch.testing.assert_close(factor(kfac, "0/A"), wanted, rtol=1e-12, atol=1e-13)
    assert kfac.stats().factor_updates == 3


def test_warm_start_is_the_authors_identity():
    net, (x, y) = mlp(5, 3), regression()
    kfac, optimizer = made(net, lr=0.0, factor_decay=0.95, warm_start="identity")
    half_squares(net(x), y).backward()
    optimizer.step()
    wanted = 0.95 * torch.eye(6).double() + 0.05 * moment(x)
    torch.testing.assert_close(factor(kfac, "0/A"), wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("lr, kl_clip", [(0.5, 1e-3), (1e-9, 1e-3), (0.5, None), (0.5, 1e9)])
def test_the_clip_by_hand(lr, kl_clip):
    net, (x, y) = mlp(5, 4, 3), regression()
    plain, (kfac, optimizer) = mlp(5, 4, 3), made(net, lr=lr, kl_clip=kl_clip)
    plain.load_state_dict(net.state_dict())
    other, _ = made(plain, lr=0.0)
    for model, who in ((net, optimizer), (plain, other)):
        half_squares(model(x), y).backward()
        if who is optimizer:
            before = gradients(net)
    other.step()
    unclipped = gradients(plain)
    lr_seen = optimizer.param_groups[0]["lr"]
    optimizer.step()
    s = sum(lr_seen**2 * float((v * before[name]).sum()) for name, v in unclipped.items())
    assert s > 0
    nu = 1.0 if kl_clip is None else min(1.0, (kl_clip / abs(s)) ** 0.5)
    assert (nu < 1) == (lr == 0.5 and kl_clip == 1e-3)
    for name, found in gradients(net).items():
        torch.testing.assert_close(found, nu * unclipped[name], rtol=1e-12, atol=1e-12)
    assert (kfac.stats().clip is None) if kl_clip is None else kfac.stats().clip == pytest.approx(nu, rel=1e-12)


def test_a_zero_gradient_is_not_clipped_to_nonsense():
    net, (x, _) = mlp(5, 3), regression()
    kfac, optimizer = made(net, kl_clip=1e-3)
    half_squares(net(x), net(x).detach()).backward()
    optimizer.step()
    assert kfac.stats().clip == 1
    assert all(p.grad.isfinite().all() and not p.grad.any() for p in net.parameters())


def test_damping_may_be_a_function_of_the_step():
    net, (x, y) = mlp(5, 3), regression()
    asked = []
    kfac, optimizer = made(net, lr=0.0, damping=lambda step: asked.append(step) or 1.0 / (1 + step))
    for _ in range(3):
        half_squares(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert asked == [0, 1, 2]
    inverse = unpack_upper(inverses(kfac)["inverse/0/A"])
    torch.testing.assert_close(torch.linalg.inv(inverse), factor(kfac, "0/A") + torch.eye(6).double() / 3)
    kfac.close()
    kfac, optimizer = made(net, damping=lambda step: -1.0)
    half_squares(net(x), y).backward()
    with pytest.raises(ValueError, match=r"damping\(0\)=-1.0"):
        optimizer.step()


def test_the_models_own_fisher_tends_to_the_closed_form():
    torch.manual_seed(0)
    net = nn.Linear(4, 3).double()
    x = torch.randn(4000, 4).double()
    probabilities = net(x).softmax(-1).detach()
    wanted = (torch.diag_embed(probabilities) - probabilities.unsqueeze(2) * probabilities.unsqueeze(1)).mean(0)
    kfac, optimizer = made(net, lr=0.0, fisher="sampled")
    out = net(x)
    kfac.fisher_backward(out, "categorical", torch.Generator().manual_seed(1))
    assert net.weight.grad is None
    out.square().mean().backward()
    optimizer.step()
    torch.testing.assert_close(factor(kfac, "/G"), wanted, rtol=0, atol=0.01)


def test_a_fisher_that_was_not_asked_for_is_missed():
    net, (x, y) = mlp(5, 3), regression()
    kfac, optimizer = made(net, fisher="sampled", factor_update_steps=2, inv_update_steps=2)
    half_squares(net(x), y).backward()
    with pytest.raises(RuntimeError, match="fisher_backward"):
        optimizer.step()
    optimizer.zero_grad()
    out = net(x)
    kfac.fisher_backward(out, "gaussian")
    half_squares(out, y).backward()
    optimizer.step()
    optimizer.zero_grad()
    half_squares(net(x), y).backward()  # no statistic is due
    optimizer.step()
    with pytest.raises(ValueError, match="categorical, gaussian"):
        sampled_loss(out, "poisson")
    kfac.close()
    with pytest.raises(RuntimeError, match="empirical"):
        made(net)[0].fisher_backward(out, "gaussian")


def test_modules_that_are_called_twice_add_rows():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4).double()

        def forward(self, x):
            return self.inner(torch.tanh(self.inner(x)))

    torch.manual_seed(0)
    net, x = Twice(), torch.randn(6, 4).double()
    kfac, optimizer = made(net, lr=0.0)
    for _ in range(4):  # from the third round on messages leave early
        out = net(x)
        out.square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        wanted = moment(x) + moment(torch.tanh(net.inner(x)))
    torch.testing.assert_close(factor(kfac, "inner/A"), wanted)


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_activation_checkpointing(reentrant, caplog):
    torch.manual_seed(0)
    inner, outer = mlp(5, 4, 4), mlp(4, 3)
    net = nn.ModuleDict({"inner": inner, "outer": outer})
    kfac, optimizer = made(net, lr=0.0, skip_layers=[])
    x, y = regression()
    x.requires_grad_(True)
    with caplog.at_level(logging.WARNING, "thinwire"):
        half_squares(outer(checkpoint(inner, x, use_reentrant=reentrant)), y).backward()
        optimizer.step()
    if reentrant:  # its first pass is without a graph: told, and left to the optimizer
        assert "inner.0/A: there is no statistic" in caplog.text
        return
    torch.testing.assert_close(factor(kfac, "inner.0/A"), moment(x))


def test_evaluation_does_not_count():
    net, (x, y) = mlp(5, 3), regression()
    kfac, optimizer = made(net, lr=0.0)
    with torch.no_grad():
        net(100 * x)
    net.eval()
    net(100 * x)
    net.train()
    half_squares(net(x), y).backward()
    optimizer.step()
    torch.testing.assert_close(factor(kfac, "0/A"), moment(x))


def test_with_a_sync_of_one_process_and_a_round_trip():
    net, (x, y) = mlp(5, 4, 3), regression()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with tw.attach(net, optimizer) as sync:
        kfac = KFAC(net, sync, damping=0.1, **EVERY)
        for _ in range(2):
            half_squares(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        state = sync.state_dict()
        saved = inverses(kfac)
        half_squares(net(x), y).backward()
        optimizer.step()
        sync.load_state_dict(state)
        found = inverses(kfac)
        assert len(found) == 4
        assert all(torch.equal(found[name], x) for name, x in saved.items())
        with pytest.raises(ValueError, match="scaling='authors'"):
            kfac.load_state_dict({**kfac.state_dict(), "scaling": "authors"})
        with pytest.raises(ValueError, match="version 1"):
            kfac.load_state_dict({**kfac.state_dict(), "version": 7})
    weight = net[0].weight.grad.clone()
    optimizer.step()  # closed: plain gradients
    assert torch.equal(net[0].weight.grad, weight)


@pytest.mark.parametrize("options, says", [
    ({"damping": 0}, "damping=0"), ({"damping": float("nan")}, "damping=nan"),
    ({"factor_decay": 1.5}, "factor_decay=1.5"), ({"kl_clip": 0.0}, "kl_clip=0.0"),
    ({"factor_update_steps": 0}, "factor_update_steps=0"), ({"inv_update_steps": 0}, "inv_update_steps"),
    ({"fisher": "true"}, "empirical, sampled"), ({"scaling": "mine"}, "reference, authors, kaisa"),
    ({"tokens": "all"}, "expand"), ({"warm_start": "zeros"}, "identity"),
    ({"schedule": "spdkfac"}, "schedule='spdkfac'.*dkfac, mpd, dp"), ({"schedule": "kaisa"}, "kaisa:<fraction>"),
    ({"schedule": None}, "use one of"), ({"wire_dtype": "int8"}, "fp32, bf16"),
    ({"skip_layers": ["*"]}, "no trainable"), ({"method": "svd"}, "method='svd'.*inverse, inverse_pi"),
    ({"factor_decay": "slow"}, "or 'warmup'"), ({"max_dim": 0}, "max_dim=0"),
])  # fmt: skip
def test_bad_options(options, says):
    with pytest.raises(ValueError, match=says):
        made(mlp(5, 3), **options)


def test_other_refusals():
    net, shown = mlp(5, 3), inspect.signature(KFAC).parameters.values()
    assert sum(p.kind is not p.VAR_KEYWORD for p in shown) == 10  # what few need is Variant's
    with pytest.raises(TypeError, match=r"schedule= is an option of Variant: .*variant=Variant\(schedule=\.\.\.\)"):
        KFAC(net, None, schedule="mpd")
    with pytest.raises(TypeError, match="no option 'dampng'"):
        KFAC(net, None, dampng=0.1)
    with pytest.raises(ValueError, match="optimizer=optimizer"):
        KFAC(net, None, damping=0.1)
    with pytest.warns(UserWarning, match="inv_update_steps=5 is not a multiple"):
        made(net, factor_update_steps=3, inv_update_steps=5)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with tw.attach(net, optimizer) as sync, pytest.raises(ValueError, match="another model"):
        KFAC(mlp(5, 3), sync, damping=0.1)


def test_a_fused_optimizer_must_be_unscaled_first():
    net, (x, y) = mlp(5, 3).float(), regression()
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    kfac = KFAC(net, None, optimizer=optimizer, variant=Variant(scaler=scaler), damping=0.1, **EVERY)
    scaler.scale(half_squares(net(x.float()), y.float())).backward()
    with pytest.raises(RuntimeError, match="unscale_"):
        scaler.step(optimizer)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert kfac.stats().steps == 1


def test_a_loss_scale_leaves_no_trace_in_the_factors():
    found = []
    for scale in (1.0, 2.0**16):
        torch.manual_seed(0)
        net, (x, y) = mlp(5, 3), regression()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        kfac = KFAC(net, None, optimizer=optimizer, variant=Variant(scaler=scaler), damping=0.1, **EVERY)
        scaler.scale(half_squares(net(x), y)).backward()
        scaler.step(optimizer)
        found.append(factor(kfac, "0/G"))
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=0)


# --- the ill-conditioned task ----------------------------------------------------------------------------------------


def steps_to(target, most, lr, kfac):
    workload = build_model("teacher")
    optimizer = torch.optim.SGD(workload.model.parameters(), lr, momentum=0.9)
    if kfac:
        KFAC(workload.model, None, optimizer=optimizer, damping=1e-3, method="eigen", **EVERY)
    for step in range(most):
        workload.loss(workload.model, step, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 19 and not workload.held_out_loss() >= target:
            return step + 1 if bool(next(workload.model.parameters()).isfinite().all()) else None
    return None


def test_the_ill_conditioned_task():
    steps = steps_to(0.3, 260, 0.1, kfac=True)
    assert steps is not None
    assert steps <= 260
    assert all(steps_to(0.3, 260, lr, kfac=False) is None for lr in (0.03, 0.3, 3.0))  # as many steps of plain SGD


def intervals_seen(steps, **options):
    """The passes that took statistics, and those that inverted."""
    net = mlp(5, 3)
    kfac, optimizer = made(net, **{"kl_clip": 1e-3, **options})
    statistics, inversions = [], []
    for step in range(steps):
        before = kfac.stats()
        x = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after = kfac.stats()
        statistics += [step] * (after.factor_updates - before.factor_updates)
        inversions += [step] * (after.inverse_updates - before.inverse_updates)
    return statistics, inversions


def test_intervals_may_be_functions_of_the_step():
    assert intervals_seen(13, factor_update_steps=2, inv_update_steps=4) == ([0, 2, 4, 6, 8, 10, 12], [0, 4, 8, 12])
    changing = {"factor_update_steps": stepped(1, 3, at=(6,)), "inv_update_steps": stepped(2, 3, at=(5,))}
    assert intervals_seen(20, **changing) == ([0, 1, 2, 3, 4, 5, 6, 9, 12, 15, 18], [0, 2, 4, 6, 12, 18])
    with pytest.raises(ValueError, match=r"inv_update_steps\(0\)=0 must be a whole number of at least 1"):
        intervals_seen(1, inv_update_steps=lambda step: 0)


def test_the_default_damping_trains_both_examples():
    """0.001, which other libraries begin with, takes the digits to a loss in the thousands."""
    for model, most in (("teacher", 1.2), ("digits:batch=64:width=8:hidden=64", 1.0)):
        workload = build_model(model)
        optimizer = torch.optim.SGD(workload.model.parameters(), 0.1, momentum=0.9)
        with KFAC(workload.model, None, optimizer=optimizer, factor_update_steps=5, inv_update_steps=25):
            for step in range(160):
                workload.loss(workload.model, step, 0).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert workload.held_out_loss() < most


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_statistics_and_steps_do_not_follow_the_users_autocast(dtype):
    """Inputs so large that their products overflow in fp16: the factors are those of fp32, and so are the updates."""
    factors, found = [], []
    for cast in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
        kfac, optimizer = made(net, lr=0.0)
        x = 20 * torch.randn(512, 6, generator=torch.Generator().manual_seed(1)).to(dtype).float()
        with torch.autocast("cpu", dtype, enabled=cast):
            out = net[0](x)
        factors.append(factor(kfac, "0/A") if kfac.stats().factor_updates else None)
        out.float().square().mean().backward()
        net[1].weight.grad, net[1].bias.grad = torch.ones_like(net[1].weight), torch.ones_like(net[1].bias)
        net[0].weight.grad = torch.full_like(net[0].weight, 0.5)
        with torch.autocast("cpu", dtype, enabled=cast):
            optimizer.step()
        factors[-1] = factor(kfac, "0/A")
        found.append(net[0].weight.grad.clone())
    assert torch.equal(factors[0], factors[1])
    torch.testing.assert_close(factors[0], moment(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[0], found[1], rtol=5e-2, atol=1e-5)  # G follows the gradients, which were cast
    assert found[0].dtype == torch.float32


@pytest.mark.filterwarnings("ignore")  # dynamo tells of each break of the graph
def test_a_model_that_runs_no_hook_is_refused_at_the_first_step():
    """It was compiled and called before; or it is never in training mode."""
    torch._dynamo.reset()
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    call = torch.compile(net, backend="eager")
    x = torch.randn(7, 5)
    call(x)
    kfac, optimizer = made(net)
    call(x).square().mean().backward()
    with pytest.raises(RuntimeError, match="has seen no call of any layer"):
        optimizer.step()
    torch._dynamo.reset()  # as the sentence says
    optimizer.zero_grad()
    call(x).square().mean().backward()
    optimizer.step()
    assert kfac.stats().factor_updates == 1
    quiet = nn.Sequential(nn.Linear(5, 4)).eval()
    _, optimizer = made(quiet)
    quiet(x).square().mean().backward()
    with pytest.raises(RuntimeError, match="in training mode only"):
        optimizer.step()


def test_a_layer_that_makes_its_weight_anew_is_named():
    net = nn.Sequential(nn.Linear(5, 4), torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)))
    with pytest.raises(ValueError, match=r"1 makes its weight anew .*skip_layers=\['1'\]"):
        made(net)
    kfac, _ = made(net, skip_layers=["1"])
    assert kfac.plan
