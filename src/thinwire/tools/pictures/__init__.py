"""Pictures of runs: lines over an axis, with events marked; as PNG, as HTML, or in a report.

What a system draws belongs to its own package, the report's other charts to tools/report/.
"""

from thinwire.tools.pictures.picture import Level, Mark, Panel, Picture, Series, check_plot, write_picture

__all__ = ["Level", "Mark", "Panel", "Picture", "Series", "check_plot", "write_picture"]
