"""Codecs of what crosses live here: 16 bits, 8 or 4 per token, changes since the last visit, real tokens only.

What does not live here: frames and sockets, and codecs of model gradients (``methods``).
"""

from thinwire.split.codecs.chain import Chain, Visit, check_chain

__all__ = ["Chain", "Visit", "check_chain"]
