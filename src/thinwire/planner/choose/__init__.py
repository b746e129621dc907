"""Which method pays off for a model on a cluster, with how many workers, and why: simulate and rank all candidates.

The methods are passed in (all but the two dense ones); prices belong to planner/costs, measurements to measure/.
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
