"""Models as numbers: tensors in backward order with their backward seconds, by name or from a file.

Measuring them belongs to measure/, decisions based on them to planner/merge and planner/choose.
"""

from thinwire.planner.profiles.builtin import BUILTIN, builtin
from thinwire.planner.profiles.profile import ModelProfile, ModuleTime, TensorTime

__all__ = ["BUILTIN", "ModelProfile", "ModuleTime", "TensorTime", "builtin"]
