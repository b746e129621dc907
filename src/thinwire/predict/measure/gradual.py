"""A probe in pieces, between training steps and on the connections that these use, so that nobody has to stop.

Its cost: for every operation two sizes (4 and 64 KiB) are always measured, repeated for up to a millisecond; larger
ones as far as the total time allows. A piece ends with the measurement in which its share of the time runs out.
Compute, if requested, is one curve or two per piece: each takes some tens of milliseconds, on tensors of up to a
million elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from thinwire.core.collectives.exchange import LanePool
from thinwire.core.pricing.costs import KINDS, Costs, Curve, Key, Table, copies
from thinwire.core.program.ops import Scope
from thinwire.core.program.topology import Topology
from thinwire.predict.measure.probe import ExchangeTimer, ProbeRun, message_sizes, source_of
from thinwire.predict.measure.result import Point, never_falling

_LARGEST, _REPEATS = 4 << 20, 5
_ELEMENTS = 1 << 20
_CHECKS, _CHECK_SECONDS = 5, 0.01
_IDLE_SECONDS = 0.005
_SHARE_SECONDS = 0.002  # half of it is for the repeats of one measurement
_FAR = 4.0  # times the largest message
_OVER = object()


class GradualProbe:
    """A probe during training. All ranks call every method together, between two steps."""

    def __init__(
        self, lanes: LanePool, topology: Topology, rank: int, device: torch.device, backend: str, *, mesh_only: bool
    ) -> None:
        self._topology, self._backend = topology, backend
        self._wire = ExchangeTimer(
            lanes, topology, rank, device,
            counts_cpu=backend == "gloo", purpose="bucket", mesh_only=mesh_only, idle_seconds=_IDLE_SECONDS,
        )  # fmt: skip
        self.checked = 0
        self._run = ProbeRun(self._wire, 0.0)
        self._source = ""
        self._share, self._least, self._curves = 0.0, 0, 0
        self._exchanges: Iterator[None] = iter(())
        self._kernels: Iterator[None] = iter(())

    @property
    def measured(self) -> int:
        return self._run.exchanged

    def check(self, costs: Costs) -> float:
        """Return how many times longer an all-reduce of at most 10 ms takes than costs say: the median of five."""
        world = self._topology.world_size
        said, sizes = costs.lookup("AllReduce", Scope.WORLD, world), message_sizes()
        size = max((size for size in sizes if said(size) <= _CHECK_SECONDS), default=sizes[0])
        times = self._wire.time("AllReduce", Scope.WORLD, size, _CHECKS)
        self.checked += _CHECKS
        slowest: list[float] = sorted(max(row) for row in zip(*(of_rank.seconds for of_rank in times)))
        return slowest[_CHECKS // 2] / max(said(self._wire.message_bytes(size, world)), 1e-9)

    def begin(self, seconds: float, pieces: int, *, exchanges: bool, compute: Sequence[str]) -> None:
        """Set what to measure in that many pieces: exchanges for ``seconds`` in all, and these compute curves."""
        self._share = seconds / pieces
        self._least, self._curves = -(-self._run.always // pieces), -(-len(compute) // pieces)
        self._source = self._wire.text(source_of(self._backend, self._topology.world_size))
        self._run = ProbeRun(self._wire, seconds, most=_REPEATS, least_share=_SHARE_SECONDS)
        if exchanges:
            self._exchanges = self._run.exchanges(message_sizes(largest=_LARGEST))
        if compute:
            self._kernels = self._run.kernels(0.0, self._source, names=compute, largest=_ELEMENTS, least=1)

    def advance(self) -> None:
        end, count = self._run.elapsed + self._share, 0
        while (self._run.elapsed < end or count < self._least) and next(self._exchanges, _OVER) is not _OVER:
            count += 1
        for _ in range(self._curves):
            next(self._kernels, None)

    def costs(self, seen: Point | None, known: Costs) -> Costs:
        """Return what was measured, and ``known`` for what was not.

        A ``seen`` all-reduce of training steps, if larger than what was measured, sets the rate of large messages, and
        that of other operations by how often their bytes pass the busiest link.
        """
        found = self._run.result(self._backend, self._topology.layout, self._source).costs
        exchanges = found.exchanges or known.exchanges
        if seen is not None and found.exchanges:
            exchanges = with_seen(exchanges, self._topology.world_size, seen)
        return Costs(exchanges, {**known.compute, **found.compute}, found.cpu_share or known.cpu_share)


def with_seen(exchanges: Mapping[Key, Curve], world: int, seen: Point) -> dict[Key, Curve]:
    """Return the curves over all ranks, extended beyond the measured sizes through the point that was seen.

    A smaller message that took longer had a mishap, and is left out; nothing changes if even the smallest took longer.
    """
    made = dict(exchanges)
    for kind in KINDS:
        key = (kind, Scope.WORLD.value, world)
        curve = made[key]
        assert isinstance(curve, Table)
        measured = [*(curve.points[:-1] or curve.points)]  # if there are several, the last one is extrapolated
        size = seen[0] * copies("AllReduce", world) / copies(kind, world)
        if size < 2 * measured[-1][0] or seen[1] <= measured[0][1]:
            continue
        measured = [point for point in measured if point[1] < seen[1]]
        x, y = measured[-1]
        far = (_FAR * size, seen[1] + (seen[1] - y) / (size - x) * (_FAR - 1) * size)
        points = never_falling([*measured, (size, seen[1]), far])
        made[key] = replace(curve, points=points, source=f"{curve.source}; above {x:.0f} bytes as seen in training")
    return made
