"""Which gradients share a message: fusion by size, the exact merges and the published greedy rules.

What does not live here: what is in a message (methods/), when it is sent (engine/).
"""

from thinwire.planner.merge.dense import optimal_dense
from thinwire.planner.merge.fuse import fuse
from thinwire.planner.merge.greedy import greedy_mgwfbp, greedy_omgs
from thinwire.planner.merge.result import Merge
from thinwire.planner.merge.sparse import optimal_sparse

__all__ = ["Merge", "fuse", "greedy_mgwfbp", "greedy_omgs", "optimal_dense", "optimal_sparse"]
