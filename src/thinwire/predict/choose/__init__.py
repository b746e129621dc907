"""Which method pays off for a model on a cluster, with how many workers, and why: simulate and rank all candidates.

The methods are passed in, but for the two dense ones; prices belong to core/pricing/, measurements to predict/measure/.
"""

from thinwire.predict.choose.devices import DEVICES, DeviceSpec
from thinwire.predict.choose.explain import ExplainedBucket, explain
from thinwire.predict.choose.grid import Map, knee, map_of
from thinwire.predict.choose.rank import choose
from thinwire.predict.choose.result import Entry, Ranking
from thinwire.predict.choose.worth import resolved

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
