"""Cost curves: bytes -> seconds, as a line or a table, each with the provenance of its numbers."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from thinwire.core.pricing.checks import check_number

Provenance: TypeAlias = Literal["measured here", "measured elsewhere", "assumed"]


def check_provenance(provenance: str) -> None:
    """Raise ``ValueError`` unless ``provenance`` is one of the three allowed words."""
    if provenance not in get_args(Provenance):
        raise ValueError(f"provenance={provenance!r} is unknown; use one of {', '.join(get_args(Provenance))}")


@dataclass(frozen=True)
class Linear:
    """A start-up time plus a rate.

    Attributes:
        startup_seconds: time of a message of any size.
        seconds_per_byte: time of one byte. (Compute curves may count elements or FLOPs instead: ``Costs.compute``.)
        provenance: where the numbers come from.
        source: provenance in free text.
    """

    startup_seconds: float
    seconds_per_byte: float
    provenance: Provenance = "assumed"
    source: str = ""

    def __post_init__(self) -> None:
        check_number("startup_seconds", self.startup_seconds)
        check_number("seconds_per_byte", self.seconds_per_byte)
        check_provenance(self.provenance)

    def __call__(self, size: float) -> float:
        """Return the seconds for that many bytes."""
        return self.startup_seconds + self.seconds_per_byte * size

    def stretched(self, startup: float, rest: float, source: str) -> Linear:
        """Return a guess: the start-up times one factor, the rest times another."""
        return Linear(self.startup_seconds * startup, self.seconds_per_byte * rest, "assumed", source)


@dataclass(frozen=True)
class Table:
    """Measured points with straight lines between them: constant below the first, the last slope beyond the last.

    Attributes:
        points: (bytes, seconds), bytes ascending.
        provenance: where the numbers come from.
        source: provenance in free text.
    """

    points: tuple[tuple[float, float], ...]
    provenance: Provenance = "assumed"
    source: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "points", tuple((float(x), float(y)) for x, y in self.points))
        if not self.points:
            raise ValueError("points must not be empty")
        for i, (size, seconds) in enumerate(self.points):
            check_number(f"points[{i}] bytes", size)
            check_number(f"points[{i}] seconds", seconds)
            if i and size <= self.points[i - 1][0]:
                raise ValueError(f"points[{i}]: bytes must ascend, {size:g} follows {self.points[i - 1][0]:g}")
        check_provenance(self.provenance)

    def __call__(self, size: float) -> float:
        """Return the seconds for that many bytes."""
        points = self.points
        if size <= points[0][0] or len(points) == 1:
            return points[0][1]
        i = min(bisect.bisect_left(points, (size,)), len(points) - 1)
        (x0, y0), (x1, y1) = points[i - 1], points[i]
        if size > x1:  # a falling last segment is noise; extrapolated, it would become negative
            return y1 + max(0.0, (y1 - y0) / (x1 - x0)) * (size - x1)
        return y0 + (y1 - y0) * ((size - x0) / (x1 - x0))

    def stretched(self, startup: float, rest: float, source: str) -> Table:
        """Return a guess: the first point's time, as start-up, times one factor, the rest times another."""
        first = self.points[0][1]
        points = tuple((x, max(0.0, first * startup + (y - first) * rest)) for x, y in self.points)
        return Table(points, "assumed", source)


@dataclass(frozen=True)
class RingOrTree:
    """The cheaper of ring and tree, between which NCCL chooses by size.

    A tree passes pieces on. With pieces of n bytes, S bytes to send and D steps from the leaves to the root and back,
    there are D + S / n steps, each with a start-up and a piece. With the best n they take (sqrt(D a) + sqrt(S b))^2.

    Attributes:
        ring: cost of the whole ring.
        tree: start-ups along the tree and time per byte, as if nothing had to wait for a piece.
    """

    ring: Linear
    tree: Linear

    @property
    def provenance(self) -> Provenance:
        """Provenance of both curves."""
        return self.ring.provenance

    @property
    def source(self) -> str:
        """Source of both curves."""
        return self.ring.source

    def __call__(self, size: float) -> float:
        """Return the seconds for that many bytes."""
        rest = self.tree.seconds_per_byte * size
        return min(self.ring(size), (math.sqrt(self.tree.startup_seconds) + math.sqrt(rest)) ** 2)

    def stretched(self, startup: float, rest: float, source: str) -> RingOrTree:
        """Return a guess: all start-ups times one factor, the rest times another."""
        return RingOrTree(self.ring.stretched(startup, rest, source), self.tree.stretched(startup, rest, source))


Curve: TypeAlias = Linear | Table | RingOrTree


def curve_to_data(curve: Curve) -> dict[str, Any]:
    """Return a curve as data that JSON can hold."""
    numbers: dict[str, Any]
    if isinstance(curve, RingOrTree):
        return {"ring": curve_to_data(curve.ring), "tree": curve_to_data(curve.tree)}
    if isinstance(curve, Linear):
        numbers = {"startup_seconds": curve.startup_seconds, "seconds_per_byte": curve.seconds_per_byte}
    else:
        numbers = {"points": [list(point) for point in curve.points]}
    return {**numbers, "provenance": curve.provenance, "source": curve.source}


def curve_from_data(data: dict[str, Any]) -> Curve:
    """Read back what ``curve_to_data`` gave."""
    if "ring" in data:
        ring, tree = curve_from_data(data["ring"]), curve_from_data(data["tree"])
        if not (isinstance(ring, Linear) and isinstance(tree, Linear)):
            raise ValueError("ring and tree must be lines")
        return RingOrTree(ring, tree)
    if "points" in data:
        return Table(tuple((x, y) for x, y in data["points"]), data["provenance"], str(data["source"]))
    return Linear(
        float(data["startup_seconds"]), float(data["seconds_per_byte"]), data["provenance"], str(data["source"])
    )
