"""The picture of a comparison: what a plan sends and how well it trains, and the loss over the seconds on the link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from thinwire.systems.split.compare import UNSPLIT, ComparisonRow
from thinwire.tools.pictures import Level, Panel, Picture, Series

_WINDOW = 20  # steps


def compare_picture(
    rows: Sequence[ComparisonRow], losses: Mapping[str, Sequence[float]], metric: str, title: str
) -> Picture:
    """Draw scores against bytes, and losses against seconds.

    Args:
        rows: of :func:`~thinwire.split.compare.compare`.
        losses: of every step of one seed, by the name of the row.
        metric: name of the scores' metric.
        title: of the picture.
    """
    sent = tuple(
        Series(row.name, (row.wire_bytes / 1e3,), (row.score,), "points", (row.wire_bytes / 1e3, row.score))
        for row in rows
        if row.wire_bytes is not None
    )
    whole = tuple(Level(row.score, UNSPLIT) for row in rows if row.name == UNSPLIT)
    trained = []
    for row in rows:
        sums = (0.0, *accumulate(losses[row.name]))
        ends = range(min(_WINDOW, len(sums) - 1), len(sums))
        y = tuple((sums[end] - sums[max(0, end - _WINDOW)]) / min(_WINDOW, end) for end in ends if end)
        trained.append(Series(row.name, tuple(end * row.step_seconds for end in ends if end), y))
    panels = (
        Panel("kB per step through the socket", metric, sent, (), whole, log_x=True),
        Panel("seconds, the link's by the formulas", f"training loss, mean of {_WINDOW} steps", tuple(trained)),
    )
    return Picture(title, panels)
