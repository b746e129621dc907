"""One self-contained HTML page of results: plans, comparisons, timelines, curves, read from the JSON of the verbs.

Measuring belongs to predict/measure/ and tools/bench/, predicting to core/pricing/.
"""

from thinwire.tools.report.inputs import read_files
from thinwire.tools.report.page import render

__all__ = ["read_files", "render"]
