"""How far two right computations of one value may be apart: from the number format and the lengths of sums alone.

A bound that one machine's error gave fails on the next: instruction sets differ in the order of their sums.
"""

import torch


def of_sums(terms, scale, dtype=torch.float64):
    """The most that two evaluations of a sum differ by, whatever the order, with fused multiply-adds or without.

    A sum of n products is off by at most n u S, to first order, where u = eps / 2 and S is the sum of the products'
    magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, chapters 3, 4); two evaluations by twice that.

    Args:
        terms: n, the operations that stand behind one another.
        scale: S, or a bound of it.
        dtype: that is computed in.
    """
    return terms * torch.finfo(dtype).eps * scale


def nudged(x, terms, draw):
    """The tensor, each entry moved at random by at most `of_sums` of its largest.

    Training in which this is done to what enters each step ends as far from the same training without as rounding may
    lead it: how much a task amplifies an error no formula knows.
    """
    away = 2 * torch.rand(x.shape, generator=draw, dtype=x.dtype) - 1
    return x + away * of_sums(terms, float(x.detach().abs().max()), x.dtype)
