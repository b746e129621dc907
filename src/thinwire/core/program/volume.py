"""Bytes that one rank sends for an op: the formulas that the ledger, LocalWorld and the simulator share.

Ring algorithms: each rank sends 2(W-1)/W of an all-reduced buffer, (W-1)/W of a scattered one, and its gathered message
W-1 times. A broadcast is counted as its mean over the ranks.
"""

from __future__ import annotations

from thinwire.core.program.ops import AllGather, AllReduce, AllToAll, Broadcast, Collective, Exchange, ReduceScatter


def sent_bytes(op: Collective, members: int) -> int:
    """Return the bytes that one rank sends for ``op`` in a group of ``members`` ranks (rounded to the nearest byte)."""
    size = op.tensor.numel() * op.tensor.element_size()
    others = members - 1
    if isinstance(op, AllReduce):
        return round(2 * others * size / members)
    if isinstance(op, (ReduceScatter, AllToAll, Broadcast)):
        return round(others * size / members)
    if isinstance(op, AllGather):
        return others * size
    if isinstance(op, Exchange):
        return 0 if op.peer is None else size
    raise TypeError(f"no formula for {type(op).__name__}")
