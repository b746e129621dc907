"""Probe the network and profile the model.

Decisions belong to planner/.
"""

from thinwire.measure.probe import probe
from thinwire.measure.profile_model import profile_model
from thinwire.measure.result import ProbeResult
from thinwire.measure.verdict import verdict

__all__ = ["ProbeResult", "probe", "profile_model", "verdict"]
