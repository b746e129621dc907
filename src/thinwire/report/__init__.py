"""One HTML page of results, self-contained: plans, comparisons, timelines, curves, read from the JSON of the verbs.

What does not live here: measuring (measure/, bench/), predicting (planner/).
"""

from thinwire.report.inputs import read_files
from thinwire.report.page import render

__all__ = ["read_files", "render"]
