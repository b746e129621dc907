"""LAMB against its formula in numpy."""

import oracles
import pytest
import torch
from torch import nn

from thinwire.systems.optim import LAMB

RATES = [0.1, 0.03, 0.2]
VARIANTS = {
    "plain": {},
    "no clipping": {"max_grad_norm": None},
    "loose clipping": {"max_grad_norm": 1e6},
    "no decay": {"weight_decay": 0.0},
    "no decay, all adapted": {"weight_decay": 0.0, "adapt_all": True},
    "all adapted": {"adapt_all": True},
    "nothing skipped": {"skip": None},
    "all skipped": {"skip": "all"},
    "other moments": {"betas": (0.5, 0.9), "eps": 0.1},
    "maximize": {"maximize": True},
}


def make(**options):
    return lambda parameters: LAMB(parameters, 1.0, **options)


def numpy_names(options):
    names = {"weight_decay": "wd", "max_grad_norm": "limit"}
    return {names.get(key, key): value for key, value in options.items()}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_the_formula(options):
    weights, gradients = oracles.problem()
    parameters, _ = oracles.run(make(**options), weights, gradients, RATES)
    oracles.close(parameters, oracles.lamb(weights, gradients, RATES, **numpy_names(options)))


@pytest.mark.parametrize("over", [0.999, 1.0, 1.001, 50.0])
def test_the_edge_of_clipping(over):
    weights, gradients = oracles.problem(3, [(6, 4), (4,)])
    total = float(torch.cat([g.reshape(-1) for g in gradients[0]]).norm())
    parameters, _ = oracles.run(make(max_grad_norm=total / over), weights, gradients, RATES)
    oracles.close(parameters, oracles.lamb(weights, gradients, RATES, limit=total / over))


def test_without_decay_it_is_adam():
    weights, gradients = oracles.problem(5, [(6, 4), (4,)])
    ours, _ = oracles.run(make(weight_decay=0.0, max_grad_norm=None, eps=1e-8), weights, gradients, [0.01] * 5)
    theirs, _ = oracles.run(lambda p: torch.optim.Adam(p, eps=1e-8), weights, gradients, [0.01] * 5)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_clipping_is_by_the_norm_of_all_groups():
    weights, gradients = oracles.problem(3, [(6, 4), (5, 5)])
    parameters = [nn.Parameter(w.clone()) for w in weights]
    optimizer = LAMB([{"params": parameters[:1]}, {"params": parameters[1:], "betas": (0.9, 0.999)}], 1.0)
    oracles.advance(optimizer, parameters, gradients, RATES)
    oracles.close(parameters, oracles.lamb(weights, gradients, RATES))


def test_zero_norms():
    weights = [torch.zeros(3, 3), torch.ones(2, 2)]
    gradients = [[torch.ones(3, 3), torch.zeros(2, 2)]] * 3
    parameters, _ = oracles.run(make(adapt_all=True, weight_decay=0.0), weights, gradients, RATES)
    oracles.close(parameters, oracles.lamb(weights, gradients, RATES, adapt_all=True, wd=0.0))
    assert torch.equal(parameters[1], weights[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_goes_on_bit_for_bit(dtype):
    weights, gradients = oracles.problem(6)
    straight, _ = oracles.run(make(), weights, gradients, RATES * 2, dtype)
    half, optimizer = oracles.run(make(), weights, gradients[:3], RATES, dtype)
    saved = optimizer.state_dict()
    resumed = [nn.Parameter(p.detach().clone()) for p in half]
    fresh = LAMB(resumed, 9.0)
    fresh.load_state_dict(saved)
    oracles.advance(optimizer, half, gradients[3:], RATES)  # must not disturb what was loaded
    oracles.advance(fresh, resumed, gradients[3:], RATES)
    for a, b, c in zip(straight, resumed, half):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
