"""Probe the network and profile the model.

Decisions belong to core/pricing/.
"""

from thinwire.predict.measure.probe import probe
from thinwire.predict.measure.profile_model import profile_model
from thinwire.predict.measure.result import ProbeResult, verdict

__all__ = ["ProbeResult", "probe", "profile_model", "verdict"]
