"""Timed exchanges for the probe on a leased lane, and figures of all ranks on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from thinwire.core.collectives.exchange import Lane, Lanes, all_gather_flat, issue
from thinwire.core.program.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Exchange,
    ReduceScatter,
    Scope,
)
from thinwire.core.program.topology import Topology
from thinwire.predict.measure.timing import settle

_PLAIN = {
    "AllReduce": AllReduce,
    "ReduceScatter": ReduceScatter,
    "AllGather": AllGather,
    "Broadcast": Broadcast,
}
_IDLE_SECONDS = 0.05


@dataclass(frozen=True)
class Times:
    """One rank's times of one operation at one size, one entry per repeat."""

    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]

    def __add__(self, other: Times) -> Times:
        return Times(self.seconds + other.seconds, self.cpu_seconds + other.cpu_seconds)


class ExchangeTimer:
    """Times exchanges. All ranks call every method, in the same order.

    Args:
        lanes: the pool to lease from.
        topology: topology of its ranks.
        rank: this rank's place in it.
        device: device of the messages.
        counts_cpu: whether the process itself moves the bytes (Gloo).
        purpose: purpose of the timed lanes.
        mesh_only: for the lane over all ranks, see ``Lanes.get``.
        idle_seconds: time in which to find out how much else the process computes.
    """

    def __init__(
        self,
        lanes: Lanes,
        topology: Topology,
        rank: int,
        device: torch.device,
        *,
        counts_cpu: bool,
        purpose: str = "probe",
        mesh_only: bool = False,
        idle_seconds: float = _IDLE_SECONDS,
    ) -> None:
        self._lanes, self._topology, self._rank, self._purpose = lanes, topology, rank, purpose
        self.device, self.counts_cpu = device, counts_cpu
        self.scopes = tuple(Scope) if topology.two_levels else (Scope.WORLD,)
        self._control: Lane = lanes.get("agreement", Scope.WORLD, 0)
        for scope in self.scopes:  # also groups of one: torch names groups by their number, so every rank needs as many
            world = scope is Scope.WORLD
            lanes.get(purpose, scope, 0, bidirectional=world, mesh_only=world and mesh_only)
        self._tick = torch.zeros(1, device=device)
        self.meet()
        cpu, start = time.process_time(), time.perf_counter()
        time.sleep(idle_seconds)
        self._idle = (time.process_time() - cpu) / (time.perf_counter() - start)

    def meet(self) -> None:
        issue(AllReduce(self._tick), self._control).wait()
        settle(self.device)

    def gather(self, values: list[float]) -> list[list[float]]:
        """Return the figures of all ranks, in rank order; each rank passes the same number of figures."""
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        everyone = torch.empty(self._control.size * len(values), dtype=torch.float64, device=self.device)
        all_gather_flat(everyone, mine, group=self._control.group)
        rows: list[list[float]] = everyone.view(self._control.size, -1).tolist()
        return rows

    def text(self, mine: str) -> str:
        """Return the first rank's text."""
        raw = mine.encode()
        length = torch.tensor([len(raw)], device=self.device)
        dist.broadcast(length, self._control.ranks[0], group=self._control.group)
        data = torch.zeros(int(length), dtype=torch.uint8)
        if self._control.rank == 0:
            data = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        data = data.to(self.device)
        dist.broadcast(data, self._control.ranks[0], group=self._control.group)
        return bytes(data.tolist()).decode()

    def members(self, scope: Scope) -> int:
        """Return the size of the largest group of a scope."""
        return max(self.counts_of_ranks(scope))

    def counts_of_ranks(self, scope: Scope) -> list[int]:
        """Return the size of its group for each rank."""
        return [len(self._topology.members(scope, r)) for r in range(self._topology.world_size)]

    def counts(self, scope: Scope) -> list[int]:
        """Return the sizes of groups that exchange anything."""
        return sorted({n for n in self.counts_of_ranks(scope) if n > 1})

    def message_bytes(self, size: int, members: int) -> int:
        """Return the next size that consists of whole fp32 elements and is divisible by ``members``."""
        return -(-size // (4 * members)) * 4 * members

    def time(self, kind: str, scope: Scope, size: int, count: int) -> list[Times]:
        """Time an operation ``count`` times, in all groups of the scope at once; return all ranks' times by rank."""
        if len(self._topology.members(scope, self._rank)) < 2:
            return self._timed(lambda: None, count)
        lane = self._lanes.get(self._purpose, scope, 0)
        op = self._message(kind, scope, size, lane)
        return self._timed(lambda: issue(op, lane).wait(), count)

    def time_flow(self, size: int, count: int) -> list[Times]:
        """Do the same for one message from the first rank to the first of the upper half, alone and one way."""
        lane = self._lanes.get(self._purpose, Scope.WORLD, 0)
        x, to = torch.empty(size // 4, device=self.device).fill_(0.0), lane.size // 2

        def flow() -> None:
            if lane.rank == 0:
                dist.send(x, lane.ranks[to], group=lane.group)
            elif lane.rank == to:
                dist.recv(x, lane.ranks[0], group=lane.group)

        return self._timed(flow, count)

    def _timed(self, call: Callable[[], object], count: int) -> list[Times]:
        seconds, cpu_seconds = [], []
        for _ in range(count):
            self.meet()
            cpu, start = time.process_time(), time.perf_counter()
            call()
            settle(self.device)
            lasted = time.perf_counter() - start
            seconds.append(lasted)
            cpu_seconds.append(max(0.0, time.process_time() - cpu - self._idle * lasted))
        everyone = self.gather(seconds + cpu_seconds)
        return [Times(tuple(row[:count]), tuple(row[count:])) for row in everyone]

    def _message(self, kind: str, scope: Scope, size: int, lane: Lane) -> Collective:
        x = torch.empty(self.message_bytes(size, lane.size) // 4, device=self.device).fill_(0.0)  # touches every page
        if kind == "AllToAll":
            return AllToAll(x.view(lane.size, -1), scope)
        if kind != "Exchange":
            return _PLAIN[kind](x, scope)
        # Lower half with upper half: ranks are numbered machine by machine, so these pairs cross the network.
        half = lane.size // 2
        peer = lane.rank + half if lane.rank < half else lane.rank - half if lane.rank < 2 * half else None
        return Exchange(x, scope, peer)
