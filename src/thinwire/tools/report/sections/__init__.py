"""One file per section of the page: each returns its section, or None if there is no data for it.

Reading files and writing HTML do not belong here.
"""

from __future__ import annotations

from thinwire.tools.report.section import Maker
from thinwire.tools.report.sections import bench, buckets, loss, ranking, runs, timeline, winners

SECTIONS: tuple[Maker, ...] = (
    winners.section,
    ranking.section,
    bench.section,
    timeline.section,
    buckets.section,
    loss.section,
    runs.section,
)
