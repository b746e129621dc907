"""Which gradients share a message: fusion by size, and the planned merges.

What does not live here: what is in a message (methods/), when it is sent (engine/).
"""

from thinwire.planner.merge.fuse import fuse

__all__ = ["fuse"]
