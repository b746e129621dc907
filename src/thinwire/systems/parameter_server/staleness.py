"""How much an old gradient counts: its factor alpha, and the learning rate of an update with few gradients."""

from __future__ import annotations

import math

UNBOUNDED = 1 << 62
"""Stands for infinity among versions, which are 64-bit integers."""

ALPHAS = ("none", "inverse", "reciprocal", "invsqrt")
NORMS = ("one", "alpha")
LR_SCALES = ("none", "linear", "sqrt")


def alpha(rule: str, tau: int) -> float:
    """Return the factor of a gradient that is ``tau`` versions old.

    Args:
        rule: "none": 1; "inverse": 1 / max(tau, 1) (arXiv 1511.05950); "reciprocal": 1 / (1 + tau); "invsqrt":
            1 / sqrt(1 + tau) (FedBuff).
        tau: version at which it is applied minus version on which it was computed; at least 0.

    Example:
        >>> [alpha("inverse", tau) for tau in (0, 1, 2, 4)]
        [1.0, 1.0, 0.5, 0.25]
        >>> [alpha("reciprocal", tau) for tau in (0, 1, 3)]
        [1.0, 0.5, 0.25]
    """
    if rule == "inverse":
        return 1.0 / max(tau, 1)
    if rule == "reciprocal":
        return 1.0 / (1 + tau)
    if rule == "invsqrt":
        return 1.0 / math.sqrt(1 + tau)
    return 1.0


def norm(rule: str, alpha_rule: str, tau: int) -> float:
    """Return what a gradient adds to the divisor.

    "one": 1, so stale steps are shorter; "alpha": the factor, so staleness affects only the direction.
    """
    return alpha(alpha_rule, tau) if rule == "alpha" else 1.0


def lr_scale(rule: str, gradients: int, full: int) -> float:
    """Return the factor of the learning rate for an update that averages ``gradients`` of the expected ``full``.

    Example:
        >>> lr_scale("linear", 2, 8), lr_scale("sqrt", 2, 8), lr_scale("none", 2, 8)
        (0.25, 0.5, 1.0)
    """
    if rule == "none" or gradients == 0:
        return 1.0
    share = gradients / max(full, 1)
    return math.sqrt(share) if rule == "sqrt" else share
