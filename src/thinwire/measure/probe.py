"""Measures every collective of the language on the real process group, over message sizes, within a time budget.

All ranks gather all figures before anything is decided, so they take the same sizes, stop at the same time and end
with the same costs.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import date, timedelta

import torch
import torch.distributed as dist

from thinwire.collectives.lanes import Lanes
from thinwire.collectives.topology import topology_of
from thinwire.measure.fit import never_falling
from thinwire.measure.kernels import KERNELS, kernel_points
from thinwire.measure.result import Measurement, ProbeResult
from thinwire.measure.schedule import LARGEST, coarse_to_fine, expected_seconds, message_sizes, repeats
from thinwire.measure.wire import ExchangeTimer
from thinwire.planner.curves import Curve, Table
from thinwire.planner.formulas import KINDS
from thinwire.program.ops import Scope
from thinwire.program.topology import Topology

Progress = Callable[[float, str], None]
"""Called with the share that is done and what comes next."""

_ALWAYS = 2  # sizes that are measured whatever they cost: without two there is no rate
_MOST_BYTES = 1 << 30  # that an all-gather may fill


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
        process_group: of Gloo or NCCL; None: the default one.
        topology: which rank sits on which machine; None: from torchrun's LOCAL_WORLD_SIZE. With several ranks on
            several machines the groups of a machine and across machines are measured too.
        largest_bytes: of a message.
        seconds: for the exchanges; what does not fit is left out, the largest messages first.
        kernel_seconds: for compute, on all ranks at once; 0: leave it out.
        device: of the messages; None: the current GPU for NCCL, else the CPU.
        timeout: of the collectives; None keeps torch's.
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
    backend = str(dist.get_backend(process_group))
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")
    sizes = message_sizes(largest=largest_bytes)
    lanes = Lanes(ranks, topology, rank, timeout, device if "nccl" in backend else None)
    broken = True
    try:
        wire = ExchangeTimer(lanes, topology, rank, device, counts_cpu="gloo" in backend)
        run = _Run(wire, seconds, on_progress)
        if len(ranks) > 1:
            run.exchanges(sizes)
        compute = run.compute(kernel_seconds, wire.text(_source(backend, len(ranks))))
        broken = False
    finally:
        lanes.release(broken=broken)
    on_progress(1.0, "done")
    return run.result(backend, topology.layout, compute)


def _source(backend: str, world: int) -> str:
    return f"{platform.node()}, {date.today()}, {backend}, torch {torch.__version__}, {world} ranks"


class _Run:
    """One probe: what is known so far, and what is left of the time."""

    def __init__(self, wire: ExchangeTimer, seconds: float, on_progress: Progress) -> None:
        self._wire, self._seconds, self._progress = wire, seconds, on_progress
        self._began = time.perf_counter()
        self._elapsed = 0.0
        self._known: dict[tuple[str, Scope], dict[int, float]] = {}  # slowest group's seconds by nominal size
        self._found: list[Measurement] = []
        self._dropped: list[tuple[str, str, int, int]] = []
        self._flow: float | None = None
        self._source = ""

    def exchanges(self, sizes: Sequence[int]) -> None:
        """Measure every operation in every scope, coarse sizes first."""
        wanted = [(kind, scope) for scope in self._wire.scopes for kind in KINDS]
        order = coarse_to_fine(list(sizes))
        for position, size in enumerate(order):
            for i, (kind, scope) in enumerate(wanted):
                self._progress(0.9 * (position + i / len(wanted)) / len(order), f"{kind} {scope.value} {size} bytes")
                known = self._known.setdefault((kind, scope), {})
                share = max(0.0, self._seconds - self._elapsed) / (len(wanted) - i)
                if position < _ALWAYS or (
                    2 * expected_seconds(size, known) <= share and size * self._wire.members(scope) <= _MOST_BYTES
                ):
                    self._measure(kind, scope, size, share)
                else:
                    self._dropped += [
                        (kind, scope.value, n, self._wire.message_bytes(size, n)) for n in self._wire.counts(scope)
                    ]
        size, lasted = max(self._known["Broadcast", Scope.WORLD].items())
        times = self._wire.time_flow(size, repeats(lasted, max(1.0, self._seconds - self._elapsed)))
        self._flow = 8 * size / max(statistics.median(of_rank.seconds) for of_rank in times)

    def _measure(self, kind: str, scope: Scope, size: int, share: float) -> None:
        if not self._known[kind, scope]:
            self._wire.time(kind, scope, size, 1)  # opens connections
        times = self._wire.time(kind, scope, size, 1)
        more = repeats(max(of_rank.seconds[0] for of_rank in times), share) - 1
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
        self._elapsed = max(self._wire.gather([time.perf_counter() - self._began]))[0]

    def compute(self, seconds: float, source: str) -> dict[str, Curve]:
        """Measure compute on all ranks at once; the slowest rank counts."""
        self._source = source
        if not seconds:
            return {}
        self._progress(0.9, "compute")
        points = kernel_points(self._wire.device, seconds=seconds, meet=self._wire.meet)
        curves: dict[str, Curve] = {}
        for name in KERNELS:
            sizes = [x for x, _ in points[name]]
            slowest = [max(column) for column in zip(*self._wire.gather([y for _, y in points[name]]))]
            curves[name] = Table(never_falling(list(zip(sizes, slowest))), "measured here", source)
        return curves

    def result(self, backend: str, layout: tuple[int, ...], compute: dict[str, Curve]) -> ProbeResult:
        seconds = self._elapsed
        found = tuple(sorted(self._found, key=lambda m: (*m.key, m.bytes)))
        dropped = tuple(sorted(self._dropped))
        return ProbeResult(self._source, backend, layout, found, dropped, self._flow, compute, seconds)
