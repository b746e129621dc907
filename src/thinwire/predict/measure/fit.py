"""From measured points to curves: a straight line with its residuals, and a table that never falls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Point = tuple[float, float]
"""(bytes, seconds)."""

_TINY = 1e-9


@dataclass(frozen=True)
class LinearFit:
    """A start-up time plus a rate, and how well they describe the points.

    Attributes:
        startup_seconds: at least 0.
        seconds_per_byte: at least 0.
        residuals: per point, (measured - line) / measured.
    """

    startup_seconds: float
    seconds_per_byte: float
    residuals: tuple[float, ...]

    @property
    def worst(self) -> float:
        """The residual with the largest absolute value."""
        return max(map(abs, self.residuals), default=0.0)

    def __call__(self, size: float) -> float:
        """Return the seconds for that many bytes."""
        return self.startup_seconds + self.seconds_per_byte * size


def fit_line(points: Sequence[Point]) -> LinearFit:
    """Fit a line through measured points; neither its start-up nor its rate is negative.

    Least squares weighted by 1 / seconds, a compromise between absolute errors (small messages would not count) and
    relative ones (a kink among small messages would distort the rate of large ones).

    Raises:
        ValueError: there is no point.
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
    """Return the points in ascending order without falling costs: falling points are noise, replaced by their mean.

    Upward kinks are kept.
    """
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
