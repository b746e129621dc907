"""Optimizers for large batches: LARS and LAMB, sharing their layers' ratios among ranks, and the recipe around them.

Not here: how gradients are averaged (methods/, engine/), the data (data/), the model.
"""

from thinwire.optim.lamb import LAMB
from thinwire.optim.lars import LARS
from thinwire.optim.pto import TrustRatios
from thinwire.optim.recipe import param_groups, scaled_lr, warmup_poly, zero_last_norm

__all__ = [
    "LAMB",
    "LARS",
    "TrustRatios",
    "param_groups",
    "scaled_lr",
    "warmup_poly",
    "zero_last_norm",
]
