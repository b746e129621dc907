"""Which method pays for a model on a cluster, over how many workers, and why: every candidate simulated and ranked.

What does not live here: the methods (all but the two dense ones are passed in), prices (planner/costs), measurements
(measure/).
"""

from thinwire.planner.choose.devices import DEVICES, DeviceSpec
from thinwire.planner.choose.explain import ExplainedBucket, explain
from thinwire.planner.choose.grid import Map, map_of
from thinwire.planner.choose.knee import knee
from thinwire.planner.choose.rank import choose
from thinwire.planner.choose.resolved import resolved
from thinwire.planner.choose.result import Entry, Ranking

__all__ = [
    "DEVICES",
    "DeviceSpec",
    "Entry",
    "ExplainedBucket",
    "Map",
    "Ranking",
    "choose",
    "explain",
    "knee",
    "map_of",
    "resolved",
]
