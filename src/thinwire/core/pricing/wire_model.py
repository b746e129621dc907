"""What a long wire carries, by TCP's formulas: how fast, and how many one-way delays an exchange takes in a row."""

from __future__ import annotations

import math

from thinwire.core.sockets import MESH_RANKS, SOCKETS

_PACKET_BITS = 8 * 1448
_RENO, _CUBIC = math.sqrt(1.5), 1.054
"""Packets on their way: times loss to the power of -1/2; times (round trip / loss) to that of 3/4 (RFC 9438, 5.1)."""
_BBR = 0.95


def turns(kind: str, members: int, startups: int) -> int:
    """Return how many one-way delays an exchange takes in a row; ``startups``: a ring's or a tree's.

    On Gloo up to 16 ranks send to all others at once: a sum and its way back, of two ranks only the sum.
    """
    if members > MESH_RANKS or kind == "Broadcast":
        return startups
    return 2 if kind == "AllReduce" and members > 2 else min(1, members - 1)


def carried(
    bits_per_second: float, trip_seconds: float, loss: float, *, sockets: int = SOCKETS, bbr: bool = False
) -> float:
    """Return the bits per second that TCP's connections carry together over a wire that loses packets.

    Args:
        bits_per_second: what the wire carries without loss.
        trip_seconds: there and back.
        loss: share of packets.
        sockets: how many connections; DDP has one.
        bbr: whether they use BBR, which loss does not slow down; else CUBIC.
    """
    if not 0 <= loss < 1:
        raise ValueError(f"a loss of {loss:%} must be from 0% to below 100%, such as 0.1%")
    if not loss or not trip_seconds:
        return bits_per_second
    if bbr:
        return bits_per_second * _BBR * (1 - loss)
    packets = max(_RENO / math.sqrt(loss), _CUBIC * (trip_seconds / loss) ** 0.75)
    together = sockets * packets * _PACKET_BITS / trip_seconds
    return 1 / math.hypot(1 / bits_per_second, 1 / together)
