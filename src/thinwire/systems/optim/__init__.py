"""Optimizers for large batches: LARS and LAMB, sharing their layers' ratios among ranks, and the recipe around them.

Not here: how gradients are averaged (core/methods/, engine/), the data (systems/data/), the model.
"""

from thinwire.systems.optim.lamb import LAMB
from thinwire.systems.optim.lars import LARS
from thinwire.systems.optim.pto import TrustRatios
from thinwire.systems.optim.recipe import param_groups, scaled_lr, warmup_poly, zero_last_norm

__all__ = [
    "LAMB",
    "LARS",
    "TrustRatios",
    "param_groups",
    "scaled_lr",
    "warmup_poly",
    "zero_last_norm",
]
