"""The picture of a search: error against latency."""

from __future__ import annotations

from thinwire.systems.supernet.search import SearchResult
from thinwire.tools.pictures import Mark, Panel, Picture, Series


def search_picture(found: SearchResult, limit_ms: float) -> Picture:
    """Draw every sub-network's error against its latency, the Pareto front, the limit and the answer."""
    best = found.best
    assert best.measured_ms is not None  # the answer of a search
    front = found.pareto()
    answer = Series(
        "answer, measured", (best.measured_ms,), (-best.fitness,), "points", (best.measured_ms, -best.fitness)
    )
    curves = (
        Series(
            "sub-networks, predicted latency",
            tuple(c.predicted_ms for c in found.archive),
            tuple(-c.fitness for c in found.archive),
            "points",
        ),
        Series("best at this latency", tuple(c.predicted_ms for c in front), tuple(-c.fitness for c in front), "steps"),
        answer,
    )
    panel = Panel(
        "latency of one pair, ms", "end-point error, px", curves, (Mark(limit_ms, f"limit, {limit_ms:g} ms"),)
    )
    return Picture(f"{len(found.archive)} sub-networks evaluated", (panel,))
