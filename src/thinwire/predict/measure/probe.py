"""Measure every collective of the language on the real process group, over message sizes, within a time budget.

All ranks gather all figures before any decision, so they use the same sizes, stop at the same time and end with the
same costs.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta

import torch
import torch.distributed as dist

from thinwire.core.collectives.exchange import Lane, LanePool, all_gather_flat, issue, long_wire
from thinwire.core.collectives.groups import backend_for, topology_of
from thinwire.core.pricing.costs import KINDS, Curve, Table
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
from thinwire.core.tcp_info import Wire
from thinwire.core.words import counted
from thinwire.predict.measure.kernels import KERNELS, LEAST_CALLS, kernel_cases, settle
from thinwire.predict.measure.result import Measurement, ProbeResult, never_falling

_PLAIN = {op.__name__: op for op in (AllReduce, ReduceScatter, AllGather, Broadcast)}
_IDLE_SECONDS = 0.05


@dataclass(frozen=True)
class Times:
    """One rank's times of one operation at one size, one entry per repeat."""

    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]

    def __add__(self, other: Times) -> Times:
        return Times(self.seconds + other.seconds, self.cpu_seconds + other.cpu_seconds)


class ExchangeTimer:
    def __init__(
        self,
        lanes: LanePool,
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
        # On its mesh two ranks leave a meeting at the same time, in Gloo's ring one is a wire's delay later.
        self._control: Lane = lanes.get("agreement", Scope.WORLD, 0, bidirectional=device.type == "cpu")
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
        raw = mine.encode()
        length = torch.tensor([len(raw)], device=self.device)
        dist.broadcast(length, self._control.ranks[0], group=self._control.group)
        data = torch.zeros(int(length), dtype=torch.uint8)
        if self._control.rank == 0:
            data = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        data = data.to(self.device)
        dist.broadcast(data, self._control.ranks[0], group=self._control.group)
        return bytes(data.tolist()).decode()

    def long(self) -> Wire | None:
        """Return what the first rank's longest wire is like, if it is long."""
        return long_wire(self._control.ranks)

    def members(self, scope: Scope) -> int:
        return max(self.counts_of_ranks(scope))

    def counts_of_ranks(self, scope: Scope) -> list[int]:
        return [len(self._topology.members(scope, r)) for r in range(self._topology.world_size)]

    def counts(self, scope: Scope) -> list[int]:
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


Progress = Callable[[float, str], None]
"""Called with the finished share and what comes next."""

SMALLEST = 4 << 10
LARGEST = 16 << 20
_MOST = 1 << 36
_STRIDES = (4, 2, 1)
_SLICE_SECONDS = 0.5
MOST_REPEATS = 15
_ALWAYS = 2  # sizes that are always measured: without two there is no rate
_MOST_BYTES = 1 << 30  # largest output of an all-gather


def message_sizes(smallest: int = SMALLEST, largest: int = LARGEST) -> list[int]:
    if not 2 * smallest <= largest <= _MOST:
        raise ValueError(
            f"the largest message must be at least {2 * smallest} bytes and at most {_MOST}, not {largest}"
        )
    sizes = [smallest]
    while sizes[-1] * 2 <= largest:
        sizes.append(sizes[-1] * 2)
    return sizes if sizes[-1] == largest else [*sizes, largest]


def coarse_to_fine(sizes: list[int]) -> list[int]:
    """Put both ends and a few between first, then the rest: if time runs out, the curve is still covered."""
    order: list[int] = []
    for stride in _STRIDES:
        chosen = [*range(0, len(sizes), stride), *([len(sizes) - 1] if stride == _STRIDES[0] else [])]
        order += [i for i in dict.fromkeys(chosen) if i not in order]
    return [sizes[i] for i in order]


def expected_seconds(size: int, measured: Mapping[int, float]) -> float:
    """Return an upper estimate: the next smaller message scaled up, or the next larger one as it is; 0 if unknown."""
    above = [known for known in measured if known >= size]
    below = [known for known in measured if known < size]
    bounds = [measured[min(above)]] if above else []
    if below:
        bounds.append(measured[max(below)] * size / max(below))
    return min(bounds, default=0.0)


def repeats(first_seconds: float, share_seconds: float) -> int:
    """Return the number of runs, given the first one's time: half a second's worth, 3 up to that time each, 1 if long.

    Never more than half of the share, so that time is left for the sizes between.
    """
    wanted = min(share_seconds / 2, max(_SLICE_SECONDS, min(3 * first_seconds, 3 * _SLICE_SECONDS)))
    return max(1, min(MOST_REPEATS, int(wanted / max(first_seconds, 1e-6) + 1e-6)))


class ProbeRun:
    """One probe. All ranks call every method, and advance every generator, together; times are the slowest's."""

    def __init__(
        self,
        wire: ExchangeTimer,
        seconds: float,
        *,
        most: int = MOST_REPEATS,
        least_share: float = 0.0,
        on_progress: Progress = lambda done, text: None,
    ) -> None:
        self._wire, self._seconds, self._progress = wire, seconds, on_progress
        self._most, self._least_share = most, least_share
        self.elapsed, self.exchanged = 0.0, 0
        self._known: dict[tuple[str, Scope], dict[int, float]] = {}  # slowest group's seconds by nominal size
        self._found: list[Measurement] = []
        self._dropped: list[tuple[str, str, int, int]] = []
        self._flow: float | None = None
        self._compute: dict[str, Curve] = {}

    @property
    def always(self) -> int:
        return _ALWAYS * len(KINDS) * len(self._wire.scopes)

    def exchanges(self, sizes: Sequence[int]) -> Iterator[None]:
        """Measure every operation in every scope, coarse sizes first; yields after each measurement."""
        wanted = [(kind, scope) for scope in self._wire.scopes for kind in KINDS]
        order = coarse_to_fine(list(sizes))
        for position, size in enumerate(order):
            for i, (kind, scope) in enumerate(wanted):
                self._progress(0.9 * (position + i / len(wanted)) / len(order), f"{kind} {scope.value} {size} bytes")
                known = self._known.setdefault((kind, scope), {})
                share = max(0.0, self._seconds - self.elapsed) / (len(wanted) - i)
                if position < _ALWAYS or (
                    2 * expected_seconds(size, known) <= share and size * self._wire.members(scope) <= _MOST_BYTES
                ):
                    self._measure(kind, scope, size, max(share, self._least_share))
                    yield
                else:
                    self._dropped += [
                        (kind, scope.value, n, self._wire.message_bytes(size, n)) for n in self._wire.counts(scope)
                    ]

    def flow(self) -> None:
        """Measure one pair of ranks that exchanges alone, with the size of the largest measured broadcast."""
        size, lasted = max(self._known["Broadcast", Scope.WORLD].items())
        times = self._wire.time_flow(size, repeats(lasted, max(1.0, self._seconds - self.elapsed)))
        self._flow = 8 * size / max(statistics.median(of_rank.seconds) for of_rank in times)

    def _measure(self, kind: str, scope: Scope, size: int, share: float) -> None:
        began, count = time.perf_counter(), 1
        # The first opens connections. NCCL opens more whenever it changes its protocol with the size.
        if not self._known[kind, scope] or self._wire.device.type == "cuda":
            self._wire.time(kind, scope, size, 1)
            count += 1
        times = self._wire.time(kind, scope, size, 1)
        more = min(self._most, repeats(max(of_rank.seconds[0] for of_rank in times), share)) - 1
        if more:
            times = [a + b for a, b in zip(times, self._wire.time(kind, scope, size, more))]
        for members in self._wire.counts(scope):
            group = [t for t, n in zip(times, self._wire.counts_of_ranks(scope)) if n == members]
            seconds = max(statistics.median(t.seconds) for t in group)
            cpu = max(statistics.median(t.cpu_seconds) for t in group) if self._wire.counts_cpu else None
            sent = self._wire.message_bytes(size, members)
            self._found.append(Measurement(kind, scope.value, members, sent, seconds, more + 1, cpu))
            slowest = self._known[kind, scope].get(size, 0.0)
            self._known[kind, scope][size] = max(slowest, seconds)
        self.exchanged += count + more
        self.elapsed += max(self._wire.gather([time.perf_counter() - began]))[0]

    def kernels(
        self,
        seconds: float,
        source: str,
        *,
        names: Sequence[str] = KERNELS,
        largest: int | None = None,
        least: int = LEAST_CALLS,
    ) -> Iterator[None]:
        """Measure compute on all ranks at once by ``kernel_cases``, counting the slowest; yields after each curve."""
        self._progress(0.9, "compute")
        for name, points in kernel_cases(
            self._wire.device, seconds=seconds, meet=self._wire.meet, names=names, largest=largest, least=least
        ):
            slowest = [max(column) for column in zip(*self._wire.gather([y for _, y in points]))]
            pairs = [(x, y) for (x, _), y in zip(points, slowest)]
            self._compute[name] = Table(never_falling(pairs), "measured here", source)
            yield

    def result(self, backend: str, layout: tuple[int, ...], source: str) -> ProbeResult:
        found = tuple(sorted(self._found, key=lambda m: (*m.key, m.bytes)))
        dropped = tuple(sorted(self._dropped))
        compute, wire = dict(self._compute), self._wire.long()
        return ProbeResult(source, backend, layout, found, dropped, self._flow, compute, self.elapsed, wire)


def probe(
    process_group: dist.ProcessGroup | None = None,
    topology: Topology | None = None,
    *,
    largest_bytes: int = LARGEST,
    seconds: float = 40.0,
    kernel_seconds: float = 4.0,
    device: torch.device | None = None,
    timeout: timedelta | None = None,
    on_progress: Progress = lambda done, text: None,
) -> ProbeResult:
    """Measure this process group. Every rank of it calls this and gets the same result.

    Args:
        process_group: a Gloo or NCCL group; None: the default one.
        topology: which rank sits on which machine; None: from torchrun's LOCAL_WORLD_SIZE. With several ranks on
            several machines the groups of a machine and across machines are measured too.
        seconds: time for the exchanges; what does not fit is left out, the largest messages first.
        kernel_seconds: time for compute, on all ranks at once; 0: leave it out.
        device: device of the messages; None: the current GPU for NCCL, else the CPU.
        on_progress: see ``Progress``; called on every rank.

    Raises:
        ValueError: no process group, this rank is not in it, or numbers out of range.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError("probe needs a process group: start the script with torchrun and call init_process_group")
    rank = dist.get_rank(process_group)
    if rank < 0:
        raise ValueError("this rank is not in the group: call probe on the group's ranks alone")
    ranks = tuple(dist.get_process_group_ranks(process_group if process_group is not None else dist.group.WORLD))
    if not seconds > 0 or kernel_seconds < 0:
        raise ValueError(f"seconds={seconds} must be positive and kernel_seconds={kernel_seconds} not negative")
    topology = topology or topology_of(len(ranks))
    if topology.world_size != len(ranks):
        raise ValueError(f"the topology has {topology.world_size} ranks but the group has {len(ranks)}")
    if device is None:
        on_nccl = torch.cuda.is_available() and backend_for(torch.device("cuda"), process_group) == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if on_nccl else torch.device("cpu")
    backend = backend_for(device, process_group)
    if backend is None:
        raise ValueError(f"the process group ({dist.get_backend_config(process_group)}) has no backend for {device}")
    sizes = message_sizes(largest=largest_bytes)
    lanes = LanePool(ranks, topology, rank, timeout, device if backend == "nccl" else None, process_group)
    broken = True
    try:
        wire = ExchangeTimer(lanes, topology, rank, device, counts_cpu=backend == "gloo")
        run = ProbeRun(wire, seconds, on_progress=on_progress)
        if len(ranks) > 1:
            for _ in run.exchanges(sizes):
                pass
            run.flow()
        source = wire.text(source_of(backend, len(ranks)))
        for _ in run.kernels(kernel_seconds, source) if kernel_seconds else ():
            pass
        broken = False
    finally:
        lanes.release(broken=broken)
    on_progress(1.0, "done")
    return run.result(backend, topology.layout, source)


def source_of(backend: str, world: int) -> str:
    return f"{platform.node()}, {date.today()}, {backend}, torch {torch.__version__}, {counted(world, 'rank')}"
