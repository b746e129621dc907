"""Models as numbers: tensors in backward order with their seconds, by name or from a file.

What does not live here: measuring them (measure/), deciding anything from them (planner/merge, planner/choose).
"""

from thinwire.planner.profiles.builtin import BUILTIN, builtin
from thinwire.planner.profiles.profile import ModelProfile, ModuleTime, TensorTime

__all__ = ["BUILTIN", "ModelProfile", "ModuleTime", "TensorTime", "builtin"]
