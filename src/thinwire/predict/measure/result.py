"""The result of a probe: measured messages in the terms of nccl-tests, fitted lines, costs, and a verdict."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from thinwire.core.pricing.costs import Costs, Key
from thinwire.core.pricing.curves import Curve, Linear, Table, curve_from_data, curve_to_data
from thinwire.core.pricing.formulas import KINDS
from thinwire.core.program.ops import Scope
from thinwire.core.records import UNREADABLE
from thinwire.predict.measure.fit import LinearFit, continued, fit_line, never_falling

_SCOPES = [scope.value for scope in Scope]
_BUS = {"AllReduce": 2.0, "ReduceScatter": 1.0, "AllGather": 1.0, "AllToAll": 1.0}


@dataclass(frozen=True)
class Measurement:
    """One operation at one size.

    Attributes:
        kind: the operation.
        scope: "world", "node" or "cross".
        members: ranks of the group.
        bytes: size of one rank's message, as ``planner.formulas`` counts it.
        seconds: median over repeats, on the slowest rank.
        repeats: number of timed repeats.
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
        backend: "gloo" or "nccl".
        layout: ranks of each machine.
        measurements: by operation, scope and size.
        dropped: (operation, scope, members, bytes) of sizes for which there was no time.
        flow_bits_per_second: rate of one pair of ranks that exchanges alone; None for a single rank.
        compute: curves of compute, measured on all ranks at once.
        seconds: duration of the probe.
    """

    source: str
    backend: str
    layout: tuple[int, ...]
    measurements: tuple[Measurement, ...]
    dropped: tuple[tuple[str, str, int, int], ...] = ()
    flow_bits_per_second: float | None = None
    compute: Mapping[str, Curve] = field(default_factory=dict)
    seconds: float = 0.0

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
        lines = [[*key, asdict(line)] for key, line in self.lines.items()]
        data = {
            "source": self.source,
            "backend": self.backend,
            "layout": list(self.layout),
            "seconds": self.seconds,
            "flow_bits_per_second": self.flow_bits_per_second,
            "rows": self.rows(),
            "dropped": [list(d) for d in self.dropped],
            "lines": lines,
            "compute": {name: curve_to_data(curve) for name, curve in self.compute.items()},
            "costs": json.loads(self.costs.to_json()),
        }
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str) -> ProbeResult:
        """Read back what ``to_json`` wrote; lines and costs are derived from the rows.

        Raises:
            ValueError: the text holds no result.
        """
        try:
            data: Any = json.loads(text)
            rows = tuple(Measurement(**{name: row[name] for name in _FIELDS}) for row in data["rows"])
            return cls(
                str(data["source"]),
                str(data["backend"]),
                tuple(int(n) for n in data["layout"]),
                rows,
                tuple((str(k), str(s), int(m), int(b)) for k, s, m, b in data["dropped"]),
                None if data["flow_bits_per_second"] is None else float(data["flow_bits_per_second"]),
                {str(name): curve_from_data(curve) for name, curve in data["compute"].items()},
                float(data["seconds"]),
            )
        except UNREADABLE as error:
            raise ValueError(f"this is not the result of a thinwire probe: {error}") from error


_FIELDS = tuple(Measurement.__dataclass_fields__)
