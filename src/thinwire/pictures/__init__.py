"""Pictures of runs: lines over an axis, with what happened marked; as PNG, as HTML, or in a report.

What does not live here: what a system draws (its own package), the report's other charts.
"""

from thinwire.pictures.draw import check_plot, write_picture
from thinwire.pictures.picture import Level, Mark, Panel, Picture, Series

__all__ = ["Level", "Mark", "Panel", "Picture", "Series", "check_plot", "write_picture"]
