"""Runs that contain their own picture; those with the same axes are drawn together."""

from __future__ import annotations

from thinwire.tools.pictures.colours import Colours
from thinwire.tools.pictures.draw import as_plotly
from thinwire.tools.report.figures import dress
from thinwire.tools.report.inputs import Inputs
from thinwire.tools.report.pictures import grouped
from thinwire.tools.report.section import Block, Chart, Section

_READING = (
    "What a run recorded about itself. Each name has the same colour on the whole page. Dashed lines are values to "
    "compare with; dotted ones mark what happened at that moment."
)


def section(inputs: Inputs, colours: Colours) -> Section | None:
    """Return the section; None if there are no such runs."""
    blocks = []
    for picture in grouped(inputs.runs):
        figure = as_plotly(picture, colours)
        blocks.append(Block(picture.title, charts=(Chart(dress(figure, figure.layout.height)),)))
    return Section("runs", "Runs", _READING, tuple(blocks)) if blocks else None
