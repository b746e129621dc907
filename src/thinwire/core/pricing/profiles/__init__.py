"""Models as numbers: tensors in backward order with their backward seconds, by name or from a file.

Measuring them belongs to predict/measure/, decisions based on them to planner/merge and planner/choose.
"""

from thinwire.core.pricing.profiles.builtin import BUILTIN, builtin
from thinwire.core.pricing.profiles.profile import ModelProfile, ModuleTime, TensorTime

__all__ = ["BUILTIN", "ModelProfile", "ModuleTime", "TensorTime", "builtin"]
