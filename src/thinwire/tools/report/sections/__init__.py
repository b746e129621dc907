"""The sections of the page: each is made from the results, or is None if there is no data for it.

Reading files and writing HTML do not belong here.
"""

from __future__ import annotations

from thinwire.tools.report.sections.measured import bench_section, loss_section, runs_section
from thinwire.tools.report.sections.predicted import map_section, ranking_section
from thinwire.tools.report.sections.steps import buckets_section, timeline_section

SECTIONS = (map_section, ranking_section, bench_section, timeline_section, buckets_section, loss_section, runs_section)
