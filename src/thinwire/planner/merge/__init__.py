"""Which gradients share a message: fusion by size, the exact merges and the published greedy rules.

What a message contains belongs to methods/, when it is sent to engine/.
"""

from thinwire.planner.merge.dense import optimal_dense
from thinwire.planner.merge.fuse import fuse
from thinwire.planner.merge.greedy import greedy_mgwfbp, greedy_omgs
from thinwire.planner.merge.result import Merge
from thinwire.planner.merge.sparse import optimal_sparse

__all__ = ["Merge", "fuse", "greedy_mgwfbp", "greedy_omgs", "optimal_dense", "optimal_sparse"]
