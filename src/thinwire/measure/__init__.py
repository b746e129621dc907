"""Probe the network and profile the model.

What does not live here: decisions (planner/).
"""

from thinwire.measure.kernels import measure_kernels
from thinwire.measure.probe import probe
from thinwire.measure.profile_model import profile_model
from thinwire.measure.result import Measurement, ProbeResult
from thinwire.measure.verdict import verdict

__all__ = ["Measurement", "ProbeResult", "measure_kernels", "probe", "profile_model", "verdict"]
