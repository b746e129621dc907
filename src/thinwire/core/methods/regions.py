"""Ok-Topk's exchange: every rank sums the entries of one region; then all gather the largest of these sums.

A bucket of d elements is cut into blocks of ceil(d / (64 P)), assigned to the ranks in an order drawn from (d, P), so
that no rank gets all of a layer with large gradients. A box holds at most cap = ceil(capacity k / P) pairs for one
rank, the largest first; pairs that do not fit stay in the residual. Padding is (0, -1): with a real index it would look
like a sent entry. A rank sends (P - 1) cap pairs to the regions and (P - 1) cap more in the all-gather: for any P, less
than 2 capacity k.

Paper: Li, Hoefler: Near-optimal sparse allreduce for distributed deep learning, PPoPP 2022. Applied: the k largest sums
of all regions, over P. E: everything that is not among them, or did not fit on the way.

Differences from the paper: messages have a fixed size (``capacity``), so that shapes, prices and buffers are known in
advance; regions are blocks assigned at random, and not re-balanced from the data; selection is exact at every step,
whereas the paper reuses thresholds for 32 steps; any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from thinwire.core.kernels.pairs import add_pairs, by_index, contains, largest, pack, to_wire, unpack
from thinwire.core.kernels.seeding import generator
from thinwire.core.kernels.select import top_k
from thinwire.core.methods.base import all_finite
from thinwire.core.program import AllGather, AllToAll, State

Pairs = tuple[Tensor, Tensor]


def capacity_of(k: int, ranks: int, capacity: float) -> int:
    return min(k, math.ceil(capacity * k / ranks))


@dataclass(frozen=True)
class Regions:
    """Which rank sums which blocks. ``owner``, ``place``: of each block, its rank and its place in that rank's region.

    ``blocks``: the blocks of each region ``[P, most]``, ascending, padded with a number behind the last block.
    """

    block: int
    owner: Tensor
    place: Tensor
    blocks: Tensor


@lru_cache(maxsize=256)
def regions(d: int, ranks: int, device: torch.device) -> Regions:
    """Return the regions of a bucket of d elements; equal on all ranks and in all runs."""
    block = max(1, -(-d // (64 * ranks)))
    count = -(-d // block)
    owner = torch.randperm(count, generator=generator("regions", d, ranks)) % ranks
    blocks = torch.full((ranks, -(-count // ranks)), count)
    place = torch.empty_like(owner)
    for rank in range(ranks):
        held = (owner == rank).nonzero().view(-1)
        blocks[rank, : held.numel()] = held
        place[held] = torch.arange(held.numel())
    return Regions(block, owner.to(device), place.to(device), blocks.to(device))


def by_region(
    values: Tensor, indices: Tensor, d: int, state: State, cap: int, wire: torch.dtype
) -> Generator[Any, Tensor, tuple[Pairs, Tensor, Tensor]]:
    """Exchange this rank's k pairs of ``d`` elements (distinct indices; all values NaN if any is not finite).

    Boxes of ``cap`` (:func:`capacity_of`) carry values in ``wire``; sums travel in the values' dtype. Returns k pairs
    of the sum, equal on all ranks to the bit, padded with index -1; for each of this rank's whether it is in it; and
    they as sent.
    """
    k, ranks, sent = indices.numel(), state.size, to_wire(values, wire)
    if indices.device.type == "meta":  # shapes only
        yield AllToAll(pack(sent[:cap], indices[:cap]).expand(ranks, -1))
        yield AllGather(pack(values[:cap], indices[:cap]))
        return (values, indices), indices < 0, sent
    table = regions(d, ranks, indices.device)
    box_values, box_indices, fits = _boxes(sent, indices, table.owner[indices // table.block], ranks, cap)
    box_values = torch.where(all_finite(values), box_values, torch.nan)  # padding too, so that every region sees NaN
    mail = yield AllToAll(pack(box_values, box_indices))
    best = _best(*unpack(mail, cap, wire), table, d, state.rank, values.dtype)
    everyone = yield AllGather(pack(*best))
    sums, places = by_index(*(x.reshape(-1) for x in unpack(everyone, cap, values.dtype)))
    kept = largest(sums, places, k)
    pairs = sums[kept], places[kept]
    return pairs, fits & contains(pairs[1], indices), sent


def _boxes(values: Tensor, indices: Tensor, owner: Tensor, ranks: int, cap: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return values and indices ``[P, cap]`` for each region, and which of the entries fit ``[k]``."""
    order = torch.sort(values.abs(), descending=True, stable=True).indices
    region, after = torch.sort(owner[order], stable=True)
    order = order[after]  # by region, the largest first
    begins = torch.searchsorted(region, torch.arange(ranks, device=region.device))
    place = torch.arange(order.numel(), device=order.device) - begins[region]
    room = place < cap
    target = torch.where(room, region * cap + place, ranks * cap)  # entries that do not fit: a place behind the boxes
    boxes = [
        x.new_full((ranks * cap + 1,), pad).scatter_(0, target, x[order]) for x, pad in ((values, 0), (indices, -1))
    ]
    fits = torch.empty_like(room).scatter_(0, order, room)
    return boxes[0][:-1].view(ranks, cap), boxes[1][:-1].view(ranks, cap), fits


def _best(
    values: Tensor, indices: Tensor, table: Regions, d: int, rank: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the cap largest sums of this rank's region from the received pairs ``[P, cap]``, with bucket indices."""
    cap, size = indices.shape[1], table.blocks.shape[1] * table.block
    block = indices.clamp(min=0) // table.block
    local = torch.where(indices < 0, max(size, cap), table.place[block] * table.block + indices % table.block)
    sums = add_pairs(torch.zeros(max(size, cap) + 1, dtype=dtype, device=values.device), values, local)[:-1]
    best, places = top_k(sums, cap)
    held = table.blocks[rank][(places // table.block).clamp(max=table.blocks.shape[1] - 1)]
    found = held * table.block + places % table.block
    there = (places < size) & (found < d)
    return torch.where(all_finite(values), best, torch.nan), torch.where(there, found, -1)
