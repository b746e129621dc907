"""The result of a probe: measured messages in the terms of nccl-tests, fitted lines, costs, and a verdict."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from thinwire.core.collectives.tcp_info import Wire
from thinwire.core.pricing.costs import KINDS, Costs, Curve, Key, Linear, Table
from thinwire.core.program.ops import Scope
from thinwire.core.records import UNREADABLE, made, plain
from thinwire.core.words import duration, rate, size

Point = tuple[float, float]
"""(bytes, seconds)."""

_TINY = 1e-9
_LOSSY = 0.0003  # share of packets, from which a loss costs CUBIC much of a long wire


@dataclass(frozen=True)
class LinearFit:
    startup_seconds: float
    seconds_per_byte: float
    residuals: tuple[float, ...]

    @property
    def worst(self) -> float:
        return max(map(abs, self.residuals), default=0.0)

    def __call__(self, size: float) -> float:
        return self.startup_seconds + self.seconds_per_byte * size


def fit_line(points: Sequence[Point]) -> LinearFit:
    """Fit a line through measured points; neither its start-up nor its rate is negative.

    Weights 1 / seconds: by absolute errors small messages would not count, by relative ones their kinks distort the
    rate.
    """
    if not points:
        raise ValueError("a line needs at least one point")
    xs = [float(x) for x, _ in points]
    ys = [max(float(y), _TINY) for _, y in points]
    ws = [1 / y for y in ys]
    total = sum(ws)
    x_mean = sum(w * x for w, x in zip(ws, xs)) / total
    y_mean = sum(w * y for w, y in zip(ws, ys)) / total
    spread = sum(w * (x - x_mean) ** 2 for w, x in zip(ws, xs))
    slope = sum(w * (x - x_mean) * (y - y_mean) for w, x, y in zip(ws, xs, ys)) / spread if spread else 0.0
    start = y_mean - slope * x_mean
    if slope < 0:
        start, slope = y_mean, 0.0
    elif start < 0:
        start, slope = 0.0, sum(w * x * y for w, x, y in zip(ws, xs, ys)) / sum(w * x * x for w, x in zip(ws, xs))
    return LinearFit(start, slope, tuple((y - start - slope * x) / y for x, y in zip(xs, ys)))


def never_falling(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return the points ascending, falling ones (noise) replaced by their mean; upward kinks are kept."""
    pools: list[tuple[float, float, int]] = []  # mean bytes, mean seconds, points
    for x, y in sorted(points):
        pools.append((x, y, 1))
        while len(pools) > 1 and pools[-2][1] >= pools[-1][1]:
            (x1, y1, n1), (x2, y2, n2) = pools[-2:]
            n = n1 + n2
            pools[-2:] = [((x1 * n1 + x2 * n2) / n, (y1 * n1 + y2 * n2) / n, n)]
    return tuple((x, y) for x, y, _ in pools)


def continued(points: Sequence[Point], factor: float = 4.0) -> tuple[Point, ...]:
    """Return the points plus one far beyond, on the slope over the last factor of sizes; two points are too noisy.

    A table extrapolates from its last two points.
    """
    x_end, y_end = points[-1]
    x_from, y_from = next((p for p in reversed(points) if p[0] * factor <= x_end), points[0])
    if x_from == x_end:
        return tuple(points)
    slope = (y_end - y_from) / (x_end - x_from)
    return (*points, (factor * x_end, y_end + slope * (factor - 1) * x_end))


_SCOPES = [scope.value for scope in Scope]
_BUS = {"AllReduce": 2.0, "ReduceScatter": 1.0, "AllGather": 1.0, "AllToAll": 1.0}


@dataclass(frozen=True)
class Measurement:
    """One operation at one size.

    Attributes:
        scope: "world", "node" or "cross".
        bytes: size of one rank's message, as ``core.pricing.costs`` counts it.
        seconds: median over repeats, on the slowest rank.
        cpu_seconds: CPU time of the process, on the rank that used most; None if the device does the work.
    """

    kind: str
    scope: str
    members: int
    bytes: int
    seconds: float
    repeats: int
    cpu_seconds: float | None = None

    @property
    def key(self) -> Key:
        """Its key in ``Costs``."""
        return self.kind, self.scope, self.members

    @property
    def algbw(self) -> float:
        """Bytes per second as nccl-tests counts them: the size of an all-gather is the total of all ranks' messages."""
        size = self.bytes * self.members if self.kind == "AllGather" else self.bytes
        return size / max(self.seconds, 1e-12)

    @property
    def busbw(self) -> float:
        """``algbw`` times 2(n-1)/n for an all-reduce, (n-1)/n for the scattering and gathering ones, else 1."""
        if self.kind not in _BUS:
            return self.algbw
        return self.algbw * _BUS[self.kind] * (self.members - 1) / self.members

    def row(self) -> dict[str, Any]:
        """Return all figures by name; ``count`` is that of fp32 elements, bandwidths are bytes per second."""
        return {**asdict(self), "count": self.bytes // 4, "dtype": "float32", "algbw": self.algbw, "busbw": self.busbw}


@dataclass(frozen=True)
class ProbeResult:
    """The result of a probe.

    Attributes:
        source: host, date, backend, torch version.
        layout: ranks of each machine.
        measurements: by operation, scope and size.
        dropped: (operation, scope, members, bytes) of sizes for which there was no time.
        flow_bits_per_second: rate of one pair of ranks that exchanges alone; None for a single rank.
        compute: curves of compute, measured on all ranks at once.
        wire: the longest wire to another rank, if its round trip takes milliseconds.
    """

    source: str
    backend: str
    layout: tuple[int, ...]
    measurements: tuple[Measurement, ...]
    dropped: tuple[tuple[str, str, int, int], ...] = ()
    flow_bits_per_second: float | None = None
    compute: Mapping[str, Curve] = field(default_factory=dict)
    seconds: float = 0.0
    wire: Wire | None = None

    @property
    def series(self) -> dict[Key, list[Measurement]]:
        """Return measurements by curve, ascending in size; all ranks first, then those of a machine, then across."""
        found: dict[Key, list[Measurement]] = {}
        for m in sorted(self.measurements, key=lambda m: m.bytes):
            found.setdefault(m.key, []).append(m)
        return dict(
            sorted(found.items(), key=lambda item: (_SCOPES.index(item[0][1]), KINDS.index(item[0][0]), item[0]))
        )

    @property
    def lines(self) -> dict[Key, LinearFit]:
        """Return start-up, seconds per byte and residuals of each curve."""
        return {key: fit_line([(m.bytes, m.seconds) for m in row]) for key, row in self.series.items()}

    @property
    def costs(self) -> Costs:
        """Return what the planner reads: a table for each operation, scope and group size."""
        exchanges: dict[Key, Curve] = {}
        shares: dict[str, Linear] = {}
        for key, row in self.series.items():
            kind, scope, _ = key
            points = continued(never_falling([(m.bytes, m.seconds) for m in row]))
            source = f"{self.source}; above {row[-1].bytes} bytes by the slope of the last factor of four"
            exchanges[key] = Table(points, "measured here", source)
            used = [(m.bytes, m.cpu_seconds) for m in row if m.cpu_seconds is not None]
            if used and scope == "world":
                line = fit_line(used)
                shares[kind] = Linear(line.startup_seconds, line.seconds_per_byte, "measured here", self.source)
        return Costs(exchanges, self.compute, shares)

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per measurement, as nccl-tests prints them."""
        return [m.row() for row in self.series.values() for m in row]

    def to_json(self) -> str:
        """Return everything, including costs and fitted lines, as JSON text."""
        found = {name: plain(value) for name, value in vars(self).items() if name != "measurements"}
        lines = [[*key, asdict(line)] for key, line in self.lines.items()]
        return json.dumps({**found, "rows": self.rows(), "lines": lines, "costs": plain(self.costs)})

    @classmethod
    def from_json(cls, text: str) -> ProbeResult:
        """Read back what ``to_json`` wrote; lines and costs are derived from the rows."""
        try:
            data: Any = json.loads(text)
            rows = [{name: row[name] for name in _FIELDS} for row in data["rows"]]
            own = {name: data[name] for name in cls.__dataclass_fields__ if name != "measurements"}
            return made(cls, {**own, "measurements": rows})
        except UNREADABLE as error:
            raise ValueError(f"this is not the result of a thinwire probe: {error}") from error


_FIELDS = tuple(Measurement.__dataclass_fields__)


_FALLS = 0.7  # of the best bus bandwidth
_BENT = 0.25  # of a measured time
_AMOUNTS = {"select": 1e6, "memory": 1e7, "multiply": 1e7, "orthogonalise": 1e6}
_COUNTS = 64 << 10  # bytes: below this, a large relative error is a small absolute one


def verdict(result: ProbeResult) -> list[str]:
    """Describe the all-reduce in one line, then anything unusual: a kink, a slow collective, sizes left out."""
    said: list[str] = []
    series = result.series
    for key, row in series.items():
        if key[0] != "AllReduce":
            continue
        line, last = result.lines[key], row[-1]
        said.append(
            f"all-reduce over {_group(key[1], key[2])}: start-up {duration(line.startup_seconds)}, bus bandwidth "
            f"{rate(last.busbw)} at {size(last.bytes)}"
        )
        best = max(row, key=lambda m: m.busbw)
        if last.busbw < _FALLS * best.busbw:
            said.append(
                f"its bus bandwidth falls from {rate(best.busbw)} at {size(best.bytes)} to {rate(last.busbw)} at "
                f"{size(last.bytes)}: large buckets cost more than they save"
            )
        flow = result.flow_bits_per_second
        if flow and key[1] == "world" and last.busbw * 8 < _FALLS * flow:
            said.append(
                f"one flow alone carries {rate(flow / 8)}, the all-reduce {last.busbw * 8 / flow:.0%} of it: "
                "processors or start-ups hold it back, not the link's rate"
            )
    said += _long(result) if result.wire is not None else []
    bent = [key for key in series if line_error(result, key) > _BENT]
    if bent:
        names = ", ".join(dict.fromkeys(key[0] for key in bent))
        said.append(f"no straight line fits {names}: the planner uses the measured table")
    said = [*said, *_left_out(result)] or [
        "one rank only: nothing is exchanged; probe with at least two to measure exchanges"
    ]
    return [*said, _compute(result)] if set(_AMOUNTS) <= set(result.compute) else said


def _long(result: ProbeResult) -> list[str]:
    """Say in three lines what a long wire is like, what it carries, and what to do about it."""
    wire, flow = result.wire, result.flow_bits_per_second
    assert wire is not None
    said = [f"a long wire: {wire}"]
    largest = max((row[-1] for key, row in result.series.items() if key[0] == "AllReduce"), key=lambda m: m.bytes)
    if flow:
        said.append(f"one connection carries {rate(flow / 8)}, thinwire's together {rate(largest.busbw)}")
    if wire.congestion_control != "bbr" and wire.lost > _LOSSY:
        said.append(
            "packets get lost: BBR carries more, if root allows it on all machines: modprobe tcp_bbr; "
            "sysctl -w net.ipv4.tcp_allowed_congestion_control='reno cubic bbr'"
        )
    else:
        said.append("each exchange takes a round trip: few of them, as local steps have, pay most here")
    return said


def _compute(result: ProbeResult) -> str:
    seconds = {name: result.compute[name](amount) for name, amount in _AMOUNTS.items()}
    rates = [_AMOUNTS[name] / 1e9 / seconds[name] for name in ("memory", "multiply", "orthogonalise")]
    return (
        f"compute, all ranks at once: selection from a million elements {duration(seconds['select'])}, "
        f"memory {rates[0]:.3g} GB/s, thin products {rates[1]:.3g} GFLOP/s, orthogonalisation {rates[2]:.3g} GFLOP/s"
    )


def line_error(result: ProbeResult, key: Key) -> float:
    pairs = zip(result.series[key], result.lines[key].residuals)
    return max((abs(off) for m, off in pairs if m.bytes >= _COUNTS), default=0.0)


def _left_out(result: ProbeResult) -> list[str]:
    largest = {key: row[-1].bytes for key, row in result.series.items()}
    beyond: dict[int, list[str]] = {}
    between = 0
    for kind, scope, members, count in result.dropped:
        top = largest.get((kind, scope, members), 0)
        if count < top:
            between += 1
        elif f"{kind} ({scope})" not in beyond.setdefault(top, []):
            beyond[top].append(f"{kind} ({scope})")
    said = [
        f"there was not enough time above {size(top)} for {', '.join(names)}: extrapolated"
        for top, names in sorted(beyond.items())
    ]
    total = between + len(result.measurements)
    return said + (
        [f"there was not enough time for {between} of {total} points between others: interpolated"] if between else []
    )


def _group(scope: str, members: int) -> str:
    return {"world": f"{members} ranks", "node": f"{members} ranks of a machine"}.get(scope, f"{members} machines")
