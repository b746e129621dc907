"""Codecs for what crosses the cut: 16 bits per number, 8 or 4 bits, changes since the last visit, real tokens.

Not here: frames and sockets, and codecs for model gradients (``methods``).
"""

from thinwire.systems.split.codecs.chain import Chain, Visit, check_chain

__all__ = ["Chain", "Visit", "check_chain"]
