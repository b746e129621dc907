"""Codecs for what crosses the cut: 16 bits, 8 or 4 bits per token, changes since the last visit, real tokens only.

Not here: frames and sockets, and codecs for model gradients (``methods``).
"""

from thinwire.split.codecs.chain import Chain, Visit, check_chain

__all__ = ["Chain", "Visit", "check_chain"]
