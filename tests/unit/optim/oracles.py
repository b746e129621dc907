"""LARS and LAMB in numpy, fp64, one tensor after the other: written from the papers' formulas."""

import numpy as np
import torch


def lars(weights, gradients, rates, *, momentum=0.9, beta=0.0, eta=0.001, eps=0.0, nesterov=False, clamp=None,
         decay_in_ratio=True, momentum_holds="update", skip="1d", skip_lr_scale=1.0, maximize=False):  # fmt: skip
    """Weights after some steps. ``gradients[t][layer]``, ``rates[t]``."""
    w = [np.array(x, dtype=np.float64) for x in weights]
    v = [np.zeros_like(x) for x in w]
    for step, rate in zip(gradients, rates):
        for i, given in enumerate(step):
            g = np.array(given, dtype=np.float64) * (-1 if maximize else 1)
            skipped = skip == "all" or (skip == "1d" and g.ndim <= 1)
            gamma, decay, share = rate, beta, 1.0
            if skipped:
                gamma, decay = rate * skip_lr_scale, 0.0
            else:
                wn, gn = np.sqrt((w[i] ** 2).sum()), np.sqrt((g**2).sum())
                if wn > 0 and gn > 0:
                    share = eta * wn / (gn + (beta * wn if decay_in_ratio else 0.0) + eps)
                    if clamp is not None:
                        share = min(max(share, clamp[0]), clamp[1])
            d = share * (g + decay * w[i])
            if momentum_holds == "update":
                v[i] = momentum * v[i] + gamma * d
                w[i] = w[i] - (momentum * v[i] + gamma * d if nesterov else v[i])
            else:
                v[i] = momentum * v[i] + d
                w[i] = w[i] - gamma * (momentum * v[i] + d if nesterov else v[i])
    return w


def lamb(weights, gradients, rates, *, betas=(0.9, 0.999), eps=1e-6, wd=0.01, limit=1.0, adapt_all=False, skip="1d",
         maximize=False):  # fmt: skip
    """Weights after some steps."""
    w = [np.array(x, dtype=np.float64) for x in weights]
    m, v = [np.zeros_like(x) for x in w], [np.zeros_like(x) for x in w]
    for t, (step, rate) in enumerate(zip(gradients, rates), 1):
        step = [np.array(g, dtype=np.float64) for g in step]
        total = np.sqrt(sum((g**2).sum() for g in step))
        shrink = 1.0 if limit is None else max(1.0, total / limit)
        for i, g in enumerate(step):
            g = g / shrink * (-1 if maximize else 1)
            m[i] = betas[0] * m[i] + (1 - betas[0]) * g
            v[i] = betas[1] * v[i] + (1 - betas[1]) * g * g
            decay = 0.0 if skip == "all" or (skip == "1d" and g.ndim <= 1) else wd
            u = m[i] / (1 - betas[0] ** t) / (np.sqrt(v[i] / (1 - betas[1] ** t)) + eps) + decay * w[i]
            wn, un = np.sqrt((w[i] ** 2).sum()), np.sqrt((u**2).sum())
            phi = wn / un if (decay != 0 or adapt_all) and wn > 0 and un > 0 else 1.0
            w[i] = w[i] - rate * phi * u
    return w


SHAPES = [(7, 5), (5,), (3, 4, 3, 3), (3,), (70, 90), (), (2, 0)]


def problem(steps=3, shapes=SHAPES, seed=0):
    """Start values ``[layer]`` and gradients ``[step][layer]``, fp32."""
    draw = torch.Generator().manual_seed(seed)
    weights = [torch.randn(shape, generator=draw) for shape in shapes]
    gradients = [[torch.randn(shape, generator=draw) for shape in shapes] for _ in range(steps)]
    return weights, gradients


def run(make, weights, gradients, rates, dtype=torch.float32):
    """The same with an optimizer: ``make(parameters)``. Returns (parameters, optimizer)."""
    parameters = [torch.nn.Parameter(w.clone().to(dtype)) for w in weights]
    optimizer = make(parameters)
    advance(optimizer, parameters, gradients, rates)
    return parameters, optimizer


def advance(optimizer, parameters, gradients, rates):
    for step, rate in zip(gradients, rates):
        for p, g in zip(parameters, step):
            p.grad = g.clone().to(p.dtype)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()


def close(parameters, expected, tolerance=1e-6, start=None):
    """``start``: where they began. What ends near zero is rounded as the larger value it came from."""
    for p, e, s in zip(parameters, expected, start or expected, strict=True):
        e, s = (torch.from_numpy(np.asarray(x)).double() for x in (e, s))
        p = p.detach().double()
        assert p.shape == e.shape
        assert float((p - e).norm()) <= tolerance * max(1e-3, float(e.norm()), float(s.norm()))
