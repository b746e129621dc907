"""Factors by their definition, in loops: what the fast ones are compared with."""

from itertools import pairwise

import torch
from torch import nn


def conv_factors(conv, x, g, ones):
    """Reference A and G of a convolution: for each example and output position one patch and one gradient."""
    kh, kw = conv.kernel_size
    (sh, sw), (dh, dw) = conv.stride, conv.dilation
    ph, pw = conv.padding
    batch, cin, high, wide = x.shape
    _, cout, oh, ow = g.shape
    d = cin * kh * kw + int(ones)
    a_sum, g_sum = torch.zeros(d, d, dtype=x.dtype), torch.zeros(cout, cout, dtype=x.dtype)
    for b in range(batch):
        for i in range(oh):
            for j in range(ow):
                patch = torch.zeros(d, dtype=x.dtype)
                at = 0
                for c in range(cin):
                    for p in range(kh):
                        for q in range(kw):
                            r, s = i * sh + p * dh - ph, j * sw + q * dw - pw
                            if 0 <= r < high and 0 <= s < wide:
                                patch[at] = x[b, c, r, s]
                            at += 1
                if ones:
                    patch[-1] = 1
                a_sum += torch.outer(patch, patch)
                own = batch * g[b, :, i, j]  # g is of the mean loss
                g_sum += torch.outer(own, own)
    return a_sum / batch, g_sum / (batch * oh * ow)


def run_once(module, x, seed=0):
    """Forward and a random mean loss: (output gradient, and .grad of the module set)."""
    out = module(x)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=out.dtype)
    out.retain_grad()
    ((out * weights).flatten(1).sum(1)).mean().backward()
    return out.grad


def dense_solve(a, g, gradient, damping):
    """``(A kron G + damping I)^-1 vec(gradient)`` by one big matrix, columns stacked."""
    big = torch.kron(a, g)
    big += damping * torch.eye(len(big), dtype=big.dtype)
    return torch.linalg.solve(big, gradient.mT.reshape(-1)).view(gradient.shape[1], -1).mT


def both_damped(a, g, gradient, damp_a, damp_g):
    """``(G + damp_g I)^-1 gradient (A + damp_a I)^-1`` by one big matrix."""
    big = torch.kron(a + damp_a * torch.eye(len(a), dtype=a.dtype), g + damp_g * torch.eye(len(g), dtype=g.dtype))
    return torch.linalg.solve(big, gradient.mT.reshape(-1)).view(gradient.shape[1], -1).mT


def mlp(*widths, bias=True, activation=nn.Tanh):
    layers = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs, bias=bias), activation()]
    return nn.Sequential(*layers[:-1]).double()
