"""Residuals of a shard: each rank has residuals for one part of the bucket, kept as slices of its parameters.

After a change of plan, or from a checkpoint of another number of ranks, a slice may no longer be in this rank's shard.
Then it is added to this rank's gradient, and the node's sum takes it to the rank whose shard it is now. This needs no
exchange of its own, and nothing is lost. (A 16-bit gradient rounds it, once.)
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from thinwire.core.program import Bucket, Slot, State


def cuts(bucket: Bucket, begin: int, end: int) -> Iterator[tuple[Slot, int, int, int]]:
    """Yield the parts of [begin, end) of a bucket by slot: (slot, place after ``begin``, place in the slot, length)."""
    start = 0
    for slot in bucket.slots:
        low, high = max(begin, start), min(end, start + slot.numel)
        if low < high:
            yield slot, low - begin, low - start, high - low
        start += slot.numel


def in_place(state: State, slot: Slot, inside: int, length: int) -> Tensor | None:
    """Return the committed residual if it is of exactly this part of the slot."""
    found = state.slice_of(slot.name)
    return found[1] if found is not None and (found[0], found[1].numel()) == (inside, length) else None


def with_debts(bucket: Bucket, state: State, begin: int, end: int) -> Tensor:
    """Return ``bucket.flat`` plus this rank's residuals outside [begin, end), from an older plan or a checkpoint.

    The node's sum takes such a residual to the rank whose shard it is now; none of it stays here.
    """
    flat, start = bucket.flat, 0
    mine = {slot.name: (inside, length) for slot, _, inside, length in cuts(bucket, begin, end)}
    for slot in bucket.slots:
        found = state.slice_of(slot.name)
        if found is not None and found[1].numel() and (found[0], found[1].numel()) != mine.get(slot.name):
            offset, owed = found
            owed = owed if bucket.scale is None else owed * bucket.scale
            flat[start + offset : start + offset + owed.numel()].add_(owed)
            if slot.name not in mine:
                state.stage_slice(slot.name, 0, owed.new_empty(0))
        start += slot.numel
    return flat
