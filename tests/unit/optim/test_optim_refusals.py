"""What LARS, LAMB and the recipe refuse: one sentence each, and nothing changed."""

import pytest
import torch
from torch import nn

from thinwire.systems.optim import LAMB, LARS, param_groups, scaled_lr, warmup_poly


def matrix(*shape, **kinds):
    return nn.Parameter(torch.ones(shape or (2, 2), **kinds))


def lars(**options):
    return lambda: LARS([matrix()], **{"lr": 0.1, **options})


def lamb(**options):
    return lambda: LAMB([matrix()], **options)


def warm(**options):
    return lambda: warmup_poly(LARS([matrix()], 0.1), **options)


@pytest.mark.parametrize("call, says", [
    (lars(lr=-1.0), "lr=-1.0 must be a finite number and at least 0"), (lars(lr=torch.tensor(1.0)), "a finite number"),
    (lars(weight_decay=-0.1), "weight_decay"), (lars(trust_coefficient=-1), "trust_coefficient"),
    (lars(eps=float("nan")), "eps"), (lars(momentum=1.0), "momentum=1.0 must be .* at least 0 and below 1"),
    (lars(momentum=0.0, nesterov=True), "nesterov=True needs a momentum"),
    (lars(clamp=(1.0, 0.5)), "lower number first"), (lars(clamp=3), "lowest, highest"),
    (lars(momentum_holds="gradient"), "update, scaled_gradient"),
    (lars(skip="2d"), "1d, all, None"), (lars(skip_lr_scale=-1), "skip_lr_scale"),
    (lars(parallel="machine"), "None, auto, node, world"), (lars(partition="random"), "cost, contiguous"),
    (lamb(betas=(0.9, 1.0)), r"betas\[1\]=1.0 must be .* at least 0 and below 1"), (lamb(betas=0.9), "two numbers"),
    (lamb(eps=-1e-8), "eps"), (lamb(max_grad_norm=0.0), "None not to clip"),
    (lamb(max_grad_norm=-1.0), "max_grad_norm"), (lamb(adapt_all=1), "True or False"),
    (lamb(weight_decay=-1.0), "weight_decay"),
    (lambda: LAMB([{"params": [matrix()], "max_grad_norm": limit} for limit in (1.0, 2.0)]), "to LAMB itself"),
    (lambda: LARS([matrix(dtype=torch.float16)], 0.1), "keep parameters fp32 and use autocast"),
    (lambda: LARS([matrix(dtype=torch.complex64)], 0.1), "complex64"),
    (lambda: LARS([matrix(), matrix(dtype=torch.float64)], 0.1), "all or none fp64"),
    (warm(total_steps=5, warmup_steps=5), "warmup_steps=5 must be below total_steps=5"),
    (warm(total_steps=5, warmup_steps=-1), "warmup_steps=-1"), (warm(total_steps=5.0, warmup_steps=1), "whole number"),
    (warm(total_steps=5, warmup_steps=1, power=-1.0), "power"),
    (lambda: scaled_lr(-1.0, 8), "base_lr=-1.0"), (lambda: scaled_lr(1.0, 0), "batch=0"),
    (lambda: scaled_lr(1.0, 8, base_batch=0.5), "base_batch=0.5"),
    (lambda: param_groups(nn.Linear(3, 2).requires_grad_(False), 0.1), "no trainable parameter"),
    (lambda: param_groups(nn.Linear(3, 2), -1.0), "weight_decay"),
])  # fmt: skip
def test_it_is_refused(call, says):
    with pytest.raises((ValueError, TypeError), match=says):
        call()


def test_sparse_gradients_are_refused():
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = LARS(table.parameters(), 0.1)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse=False"):
        optimizer.step()


def test_a_refused_group_leaves_the_optimizer_as_it_was():
    optimizer = LARS([matrix()], 0.1)
    with pytest.raises(ValueError, match="momentum"):
        optimizer.add_param_group({"params": [matrix(2)], "momentum": 2.0})
    assert len(optimizer.param_groups) == 1
