"""Residuals of a shard: each rank owes for one part of the bucket, kept as slices of the parameters in it.

After another plan, or from a checkpoint of another number of ranks, a slice is not of this rank's shard any more. It
is then added to this rank's gradient, and the node's sum takes it to the rank whose shard it is now: no exchange of its
own, and nothing is lost. (A 16-bit gradient rounds it, once.)
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from thinwire.program import Bucket, Slot, State


def cuts(bucket: Bucket, begin: int, end: int) -> Iterator[tuple[Slot, int, int, int]]:
    """What of [begin, end) of a bucket lies in which slot: (slot, place after ``begin``, place in the slot, length)."""
    start = 0
    for slot in bucket.slots:
        low, high = max(begin, start), min(end, start + slot.numel)
        if low < high:
            yield slot, low - begin, low - start, high - low
        start += slot.numel


def in_place(state: State, slot: Slot, inside: int, length: int) -> Tensor | None:
    """The committed residual, if it is of this very part of the slot."""
    found = state.slice_of(slot.name)
    return found[1] if found is not None and (found[0], found[1].numel()) == (inside, length) else None


def with_debts(bucket: Bucket, state: State, begin: int, end: int) -> Tensor:
    """``bucket.flat``, and what this rank owes of other parts than [begin, end): of an earlier plan, or a checkpoint.

    The node's sum takes such a residual to the rank whose shard it is now; here nothing is left of it.
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
