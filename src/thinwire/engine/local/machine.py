"""Rounds between machines whose ranks have equal weights: each machine's first rank exchanges, and sends the result."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from thinwire.core.program import CROSS, NODE, WORLD, Broadcast, Bucket, Program
from thinwire.core.program.ops import Collective
from thinwire.core.program.trace import TracedExchange


def across(program: Program) -> Program:
    """Turn a program of all ranks into one among one rank of each machine."""
    value = None
    while True:
        try:
            op = program.send(value)
        except StopIteration:
            return
        if isinstance(op, Collective) and op.group is WORLD:
            op = dataclasses.replace(op, group=CROSS)
        value = yield op


def by_first_ranks(program: Program, bucket: Bucket, *, first: bool) -> Program:
    """Run a bucket's round: each machine's first rank runs the program, and the others receive its result."""
    slots = bucket.slots
    if first:
        yield from across(program)
        flat = torch.cat([(slot.raw() if slot.result is None else slot.result).reshape(-1) for slot in slots])
    else:
        program.close()
        flat = torch.empty(bucket.numel, dtype=bucket.dtype, device=slots[0].device)
    flat = yield Broadcast(flat, NODE)
    for slot, piece in zip(slots, flat.split([slot.numel for slot in slots])):
        slot.result = piece.view(slot.shape)


def exchanges_of(program: Sequence[TracedExchange], name: str) -> list[TracedExchange]:
    """Return what a machine's first rank issues for a codec's exchanges.

    Raises:
        ValueError: the codec itself exchanges inside machines.
    """
    if any(one.scope is NODE for one in program):
        raise ValueError(f"{name} exchanges inside machines itself: leave inside= out, or use another codec")
    moved = [dataclasses.replace(one, scope=CROSS) if one.scope is WORLD else one for one in program]
    return [*moved, TracedExchange("Broadcast", NODE, 0, 0)]
