"""LARS against its formula in numpy, and against itself where the result is known."""

import copy
import logging

import oracles
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from thinwire.systems.optim import LAMB, LARS

RATES = [0.5, 2.0, 0.7]  # it changes: the conventions differ then
VARIANTS = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "nesterov": {"weight_decay": 0.1, "nesterov": True},
    "scaled gradient": {"weight_decay": 0.1, "momentum_holds": "scaled_gradient"},
    "scaled gradient, nesterov": {"momentum_holds": "scaled_gradient", "nesterov": True, "weight_decay": 0.1},
    "clamp above": {"clamp": (1e-5, 2e-4)},
    "clamp below": {"clamp": (0.05, 1.0)},
    "decay not in ratio": {"weight_decay": 10.0, "decay_in_ratio": False},
    "eps": {"eps": 3.0},
    "no momentum": {"momentum": 0.0, "weight_decay": 0.1},
    "nothing skipped": {"skip": None, "weight_decay": 0.1},
    "all skipped": {"skip": "all", "skip_lr_scale": 0.1, "weight_decay": 0.1},
    "slow biases": {"skip_lr_scale": 0.01, "weight_decay": 0.1},
    "slow biases, scaled gradient": {"skip_lr_scale": 0.01, "momentum_holds": "scaled_gradient"},
    "maximize": {"maximize": True, "weight_decay": 0.1},
}


def make(**options):
    return lambda parameters: LARS(parameters, 1.0, **options)


def numpy_names(options):
    return {{"weight_decay": "beta"}.get(key, key): value for key, value in options.items()}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_the_formula(options):
    weights, gradients = oracles.problem()
    parameters, _ = oracles.run(make(**options), weights, gradients, RATES)
    oracles.close(parameters, oracles.lars(weights, gradients, RATES, **numpy_names(options)))


def test_the_variants_differ():
    weights, gradients = oracles.problem()
    ends = [oracles.run(make(**o), weights, gradients, RATES)[0][0] for o in VARIANTS.values()]
    assert len({tuple(p.detach().view(-1).tolist()) for p in ends}) == len(ends) - 2  # [0] is a matrix: see below
    # slow biases leave matrices alone, under both conventions
    torch.testing.assert_close(ends[list(VARIANTS).index("slow biases")], ends[list(VARIANTS).index("decay")])


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 6), max_size=3).map(tuple), min_size=1, max_size=5),
    st.integers(0, 99),
    st.sampled_from(sorted(VARIANTS)),
)
@example([(5, 5, 6), (), (), (5, 5, 6), ()], 20, "all skipped")  # a scalar goes from 0.195 to 0.0012
def test_any_shapes(shapes, seed, name):
    weights, gradients = oracles.problem(shapes=shapes, seed=seed)
    parameters, _ = oracles.run(make(**VARIANTS[name]), weights, gradients, RATES)
    expected = oracles.lars(weights, gradients, RATES, **numpy_names(VARIANTS[name]))
    oracles.close(parameters, expected, 1e-5, start=weights)  # any seed


def test_the_ratio_is_one_where_a_norm_is_zero():
    weights = [torch.zeros(3, 3), torch.ones(3, 3)]
    gradients = [[torch.ones(3, 3), torch.zeros(3, 3)]] * 2
    parameters, _ = oracles.run(make(weight_decay=0.5, momentum=0.0), weights, gradients[:1], [0.25])
    assert parameters[0].detach().tolist() == [[-0.25] * 3] * 3  # the whole rate
    assert parameters[1].detach().tolist() == [[1 - 0.25 * 0.5] * 3] * 3  # the decay alone
    parameters, _ = oracles.run(make(weight_decay=0.5, clamp=(1e-5, 1e-4)), weights, gradients, RATES)
    oracles.close(parameters, oracles.lars(weights, gradients, RATES, beta=0.5, clamp=(1e-5, 1e-4)))


def test_a_scaled_gradient_gives_the_same_first_step():
    weights, gradients = oracles.problem(1, [(8, 8), (6, 4, 3, 3)])
    ends = [oracles.run(make(), weights, [[g * c for g in gradients[0]]], [2.0])[0] for c in (1.0, 1e-4, 3e5)]
    for other in ends[1:]:
        for a, b in zip(ends[0], other):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    moved = float((ends[0][0].detach() - weights[0]).norm() / weights[0].norm())
    assert moved == pytest.approx(2.0 * 0.001, rel=1e-3)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_foreach_is_a_loop_over_tensors(memory_format):
    draw = torch.Generator().manual_seed(3)
    shapes = [(16, 8, 3, 3), (32, 16), (32,), (8, 8, 1, 1)]
    params = [nn.Parameter(torch.randn(s, generator=draw)) for s in shapes]
    params[0].data = params[0].data.contiguous(memory_format=memory_format)
    alone = [nn.Parameter(p.detach().clone(memory_format=torch.preserve_format)) for p in params]
    together = LARS(params, 0.5, weight_decay=0.01)
    each = [LARS([p], 0.5, weight_decay=0.01) for p in alone]
    for _ in range(4):
        for p, q in zip(params, alone):
            p.grad = torch.randn(p.shape, generator=draw)
            q.grad = p.grad.clone()
        together.step()
        for one in each:
            one.step()
    for p, q in zip(params, alone):
        assert torch.equal(p, q)
        assert p.stride() == q.stride()


# --- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, model_first", [
    (torch.float32, True), (torch.bfloat16, False), (torch.bfloat16, True), (torch.float64, False),
])  # fmt: skip
def test_a_checkpoint_goes_on_bit_for_bit(dtype, model_first, tmp_path):
    weights, gradients = oracles.problem(6)
    options = {"weight_decay": 0.1, "momentum": 0.8, "clamp": (0.0, 1.0)}
    straight, _ = oracles.run(make(**options), weights, gradients, RATES * 2, dtype)
    half, optimizer = oracles.run(make(**options), weights, gradients[:3], RATES, dtype)
    torch.save([half, optimizer.state_dict()], tmp_path / "half.pt")
    with torch.serialization.safe_globals([nn.Parameter]):
        values, state = torch.load(tmp_path / "half.pt", weights_only=True)
    resumed = [nn.Parameter(torch.zeros_like(p)) for p in half]
    fresh = LARS(resumed, 123.0)

    def load_model():
        with torch.no_grad():
            for p, value in zip(resumed, values):
                p.copy_(value)

    if model_first:
        load_model()
    fresh.load_state_dict(state)
    if not model_first:
        load_model()
    assert fresh.param_groups[0]["momentum"] == 0.8
    oracles.advance(fresh, resumed, gradients[3:], RATES)
    for a, b in zip(straight, resumed):
        assert torch.equal(a, b)


def test_loading_copies():
    weights, gradients = oracles.problem()
    first, optimizer = oracles.run(make(), weights, gradients, RATES)
    other = LARS([nn.Parameter(p.detach().clone()) for p in first], 1.0)
    other.load_state_dict(optimizer.state_dict())
    ours = optimizer.state[first[0]]["momentum_buffer"]
    theirs = other.state[other.param_groups[0]["params"][0]]["momentum_buffer"]
    assert torch.equal(ours, theirs)
    assert ours.data_ptr() != theirs.data_ptr()


@pytest.mark.parametrize("make, rate, moment", [
    (make(weight_decay=0.1), 0.01, "momentum_buffer"), (lambda p: LAMB(p, 1.0), 1e-4, "exp_avg"),
])  # fmt: skip
def test_bf16_parameters_follow_an_fp32_run(make, rate, moment):
    weights, gradients = oracles.problem(20)
    weights = [w.bfloat16().float() for w in weights]
    gradients = [[g.bfloat16().float() for g in step] for step in gradients]
    rates = [rate] * 20  # steps far below a bf16's last digit
    exact, _ = oracles.run(make, weights, gradients, rates)
    half, optimizer = oracles.run(make, weights, gradients, rates, torch.bfloat16)
    for a, b in zip(exact, half):
        assert torch.equal(a, optimizer.state[b]["master"])
        assert torch.equal(a.bfloat16(), b)
        assert optimizer.state[b][moment].dtype == torch.float32


@pytest.mark.parametrize("how", ["in place", "data", "data in place"])
def test_a_parameter_written_from_outside_renews_its_master(how):
    weights, gradients = oracles.problem(2, [(4, 4)])
    (p,), optimizer = oracles.run(make(), weights, gradients[:1], [0.1], torch.bfloat16)
    kept = optimizer.state[p]["master"].clone()
    with torch.no_grad():
        if how == "in place":
            p[0] = 7.0
        elif how == "data":
            p.data = torch.cat([torch.full_like(p[:1], 7.0), p[1:]])
        else:
            p.data[0] = 7.0  # raises no version
    p.grad = torch.zeros_like(p)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.param_groups[0]["momentum"] = 0.0
    optimizer.step()
    master = optimizer.state[p]["master"]
    assert master[0].tolist() == [7.0] * 4
    assert torch.equal(master[1:], kept[1:])  # finer than bf16: was not read back


def test_a_copy_steps_alike():
    weights, gradients = oracles.problem(4)
    parameters, optimizer = oracles.run(make(weight_decay=0.1), weights, gradients[:2], RATES)
    twin_parameters, twin = copy.deepcopy((parameters, optimizer))
    for ps, o in ((parameters, optimizer), (twin_parameters, twin)):
        oracles.advance(o, ps, gradients[2:], RATES)
    assert all(torch.equal(a, b) for a, b in zip(parameters, twin_parameters))


def test_torch_conventions():
    net = nn.Linear(4, 3)
    optimizer = LARS(net.named_parameters(), 0.1)
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    x = torch.randn(5, 4)

    def closure():
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        return loss

    first = optimizer.step(closure).item()
    assert optimizer.step(closure).item() < first
    before = net.weight.detach().clone()
    optimizer.zero_grad()
    optimizer.step()  # nothing has a gradient
    assert torch.equal(before, net.weight)
    optimizer.add_param_group({"params": [("more", nn.Parameter(torch.ones(2, 2)))], "lr": 3.0, "skip": None})
    assert optimizer.param_groups[1]["momentum"] == 0.9
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step(closure)
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.01, 0.3])


def test_fp16_momentum_would_underflow():
    """Why state is fp32: at the rates of a warm-up a 16-bit momentum loses most of the update."""
    weights, gradients = oracles.problem(1, [(256, 256)])
    (p,), optimizer = oracles.run(make(), [weights[0] / 100], gradients, [0.001])
    update = optimizer.state[p]["momentum_buffer"]
    expected = 0.001 * 0.001 * (weights[0] / 100).norm() / gradients[0][0].norm() * gradients[0][0]
    torch.testing.assert_close(update, expected, rtol=1e-5, atol=0)
    assert bool((update != 0).all())
    assert float((update.half() == 0).float().mean()) > 0.9


@pytest.mark.parametrize(
    "last, options, warned",
    [
        (lambda: nn.Linear(4, 4), {}, True),
        (lambda: nn.Linear(4, 4), {"skip_lr_scale": 0.01}, False),
        (lambda: nn.Linear(4, 4), {"skip": None}, False),
        (lambda: nn.BatchNorm1d(4), {}, False),
    ],
)
def test_steep_rates_without_norms_are_warned_of(last, options, warned, caplog):
    torch.manual_seed(0)  # a bias that happens to begin with positive numbers alone passes for a norm's scale
    net = nn.Sequential(nn.Linear(4, 4), last())
    with caplog.at_level(logging.WARNING, "thinwire"):
        LARS(net.parameters(), 20.0, **options)
    assert ("skip_lr_scale=0.01" in caplog.text) == warned
