"""One self-contained HTML page of results: plans, comparisons, timelines, curves, read from the JSON of the verbs.

Measuring belongs to measure/ and bench/, predicting to planner/.
"""

from thinwire.report.inputs import read_files
from thinwire.report.page import render

__all__ = ["read_files", "render"]
