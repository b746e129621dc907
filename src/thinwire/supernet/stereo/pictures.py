"""The picture of a search: error against latency."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from thinwire.supernet.search import Candidate, pareto


def draw_pareto(
    path: str | Path, archive: Sequence[Candidate], best: Candidate, limit_ms: float, title: str = ""
) -> None:
    """Every candidate's error against its latency, the limit and the answer."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("pictures need matplotlib: pip install 'thinwire[plot]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    assert best.measured_ms is not None  # the answer of a search
    figure, axes = plt.subplots(figsize=(6.4, 4.2))
    ms, error = [c.predicted_ms for c in archive], [-c.fitness for c in archive]
    axes.scatter(ms, error, s=12, color="#8c9bab", label="candidates, predicted latency")
    front = pareto(archive)
    axes.step(
        [c.predicted_ms for c in front], [-c.fitness for c in front], where="post", color="#4a6fa5", label="best so far"
    )
    axes.axvline(limit_ms, linestyle="--", color="black", linewidth=1, label=f"limit, {limit_ms:g} ms")
    axes.scatter([best.measured_ms], [-best.fitness], marker="*", s=140, color="#d1603d", label="answer, measured")
    axes.set_xlabel("latency of one pair, ms")
    axes.set_ylabel("end-point error, px")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
