"""Which gradients share a message: fusion by size, the exact merges and the published greedy rules.

What a message contains belongs to core/methods/, when it is sent to engine/.
"""

from thinwire.core.pricing.merge.dense import optimal_dense
from thinwire.core.pricing.merge.fuse import fuse
from thinwire.core.pricing.merge.greedy import greedy_mgwfbp, greedy_omgs
from thinwire.core.pricing.merge.result import Merge
from thinwire.core.pricing.merge.sparse import optimal_sparse

__all__ = ["Merge", "fuse", "greedy_mgwfbp", "greedy_omgs", "optimal_dense", "optimal_sparse"]
