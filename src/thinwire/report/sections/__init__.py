"""One file per section of the page: each makes its section, or None where there is no data for it.

What does not live here: reading files, HTML.
"""

from __future__ import annotations

from thinwire.report.section import Maker
from thinwire.report.sections import bench, buckets, loss, ranking, runs, timeline, winners

SECTIONS: tuple[Maker, ...] = (
    winners.section,
    ranking.section,
    bench.section,
    timeline.section,
    buckets.section,
    loss.section,
    runs.section,
)
