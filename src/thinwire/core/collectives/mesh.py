"""thinwire's own connections between all ranks of a lane, for messages that Gloo's connections carry less well.

All-reduces, reduce-scatters and all-gathers are messages to and from all ranks at once, with sums in rank order. The
tensors' memory is split as bytes, not as tensors: when backward has just filled the caches, a call of torch costs some
20 microseconds, and each op has 2 (W - 1) messages or twice that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from thinwire.core.collectives.bundle import Bundle, BundleStream
from thinwire.core.collectives.socket_stream import CountdownWork, Stream, memory_of
from thinwire.core.program.bucket import working_dtype
from thinwire.core.tcp_info import Wire

CHANNELS = 2


class Mesh:
    """This rank's connections: two streams to every other rank, each with an order of its own.

    On a long wire they run over ``bundles``, one to every other rank, which all meshes of these ranks share.
    """

    def __init__(
        self,
        rank: int,
        streams: Sequence[Mapping[int, Stream | BundleStream]],
        bundles: Mapping[int, Bundle] | None = None,
    ) -> None:
        self.first, self.second = streams
        self.rank, self.size, self.bundles = rank, len(self.first) + 1, bundles or {}
        self.peers = [(rank + step) % self.size for step in range(1, self.size)]
        """The other ranks, the next one first, so that each rank starts with a different peer."""

    @classmethod
    def over(cls, rank: int, bundles: Mapping[int, Bundle]) -> Mesh:
        streams = [{peer: bundle.stream() for peer, bundle in bundles.items()} for _ in range(CHANNELS)]
        return cls(rank, streams, bundles)

    @property
    def shared(self) -> bool:
        return bool(self.bundles)

    def wire(self) -> Wire | None:
        """Return what the longest wire is like; None: none is long."""
        known = [wire for bundle in self.bundles.values() if (wire := bundle.wire()) is not None]
        return max(known, key=lambda wire: wire.trip_seconds, default=None)

    def another(self) -> Mesh:
        """Return a mesh over the same bundles."""
        return Mesh.over(self.rank, self.bundles)

    def close(self) -> None:
        for stream in (*self.first.values(), *self.second.values(), *self.bundles.values()):
            stream.close()

    def swap(self, sending: Mapping[int, Tensor], receiving: Mapping[int, Tensor]) -> CountdownWork:
        """Send tensors to ranks, and receive others from them; contiguous on the CPU."""
        work = CountdownWork(len(sending) + len(receiving))
        for peer, x in receiving.items():
            self.first[peer].receive(x, work)
        for peer, x in sending.items():
            self.first[peer].send(x, work)
        return work

    def all_reduce(self, x: Tensor) -> CountdownWork:
        """Sum over the ranks, in place; a contiguous CPU tensor.

        Each rank receives the others' parts of its own share, sums them in rank order and sends the sum to all ranks.
        These are a ring's bytes, ``2 (W - 1) / W`` of the tensor each way, but in two turns instead of ``2 (W - 1)``.
        The second turn has its own streams, because it begins when the sum is there, not in the order of the buckets.
        The sums are the same, in the same order, as those of a reduce-scatter and an all-gather.
        """
        begins = [k * x.numel() // self.size for k in range(self.size + 1)]
        memory, wide = memory_of(x), x.itemsize
        shares = [memory[wide * begin : wide * end] for begin, end in pairwise(begins)]
        mine = x.view(-1)[begins[self.rank] : begins[self.rank + 1]]
        theirs, room = self._room(mine)
        whole = CountdownWork(3 * len(self.peers))

        def summed() -> None:
            ordered_sum(self._in_order(theirs, mine), out=mine)
            for peer in self.peers:
                self.second[peer].send(shares[self.rank], whole)

        first = CountdownWork(len(self.peers), summed, whole.fail)
        for peer in self.peers:
            self.first[peer].receive(room[peer], first)
            self.second[peer].receive(shares[peer], whole)
        for peer in self.peers:
            self.first[peer].send(shares[peer], whole)
        return whole

    def reduce_scatter(self, x: Tensor) -> tuple[CountdownWork, Callable[[], Tensor]]:
        """Sum ``x``, contiguous on the CPU, of a multiple of W elements; return the work, and a call for the share."""
        mine = x.view(self.size, -1)[self.rank]
        theirs, room = self._room(mine)
        memory, share = memory_of(x), mine.nbytes
        work = CountdownWork(2 * len(self.peers))
        for peer in reversed(self.peers):
            self.first[peer].receive(room[peer], work)
        for peer in self.peers:
            self.first[peer].send(memory[share * peer : share * (peer + 1)], work)
        return work, lambda: ordered_sum(self._in_order(theirs, mine))

    def all_gather(self, x: Tensor, out: Tensor) -> CountdownWork:
        """Gather ``x`` of every rank into ``out``, in rank order; contiguous on the CPU, ``out`` W times as large."""
        memory, share = memory_of(out), x.nbytes
        if out.data_ptr() + self.rank * share != x.data_ptr():
            out.view(self.size, -1)[self.rank].copy_(x.view(-1))
        mine = memory[share * self.rank : share * (self.rank + 1)]
        work = CountdownWork(2 * len(self.peers))
        for peer in self.peers:
            self.first[peer].receive(memory[share * peer : share * (peer + 1)], work)
        for peer in self.peers:
            self.first[peer].send(mine, work)
        return work

    def _room(self, mine: Tensor) -> tuple[Tensor, dict[int, memoryview]]:
        """Allocate room for the others' parts of this rank's share: in rank order, and as memory by rank."""
        others = sorted(self.peers)
        theirs = mine.new_empty((len(others), mine.numel()))
        memory, wide = memory_of(theirs), mine.nbytes
        return theirs, {rank: memory[wide * place : wide * (place + 1)] for place, rank in enumerate(others)}

    def _in_order(self, theirs: Tensor, mine: Tensor) -> list[Tensor]:
        parts = list(theirs.unbind())
        parts.insert(self.rank, mine)
        return parts


def ordered_sum(parts: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Sum W tensors ``[k]`` in rank order, 16-bit floats in fp32, into a new tensor or ``out``, one of them or not."""
    dtype = parts[0].dtype
    wide = working_dtype(dtype) if dtype.is_floating_point else dtype
    total = parts[0].to(wide)
    if len(parts) == 1:
        return total.to(dtype, copy=True) if out is None else out.copy_(total)
    for place, part in enumerate(parts[1:], 1):
        if out is not None and wide == dtype and place == len(parts) - 1:  # nothing is read after it
            return torch.add(total, part, out=out)
        total = total + part if total is parts[0] else total.add_(part)
    return total.to(dtype) if out is None else out.copy_(total)
