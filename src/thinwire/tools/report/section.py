"""The parts of a page: sections of blocks; blocks of texts, pictures and a table. All texts are plain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from thinwire.tools.pictures.colours import Colours
from thinwire.tools.report.inputs import Inputs


@dataclass(frozen=True)
class Chart:
    """A picture.

    Attributes:
        figure: plotly's figure.
        caption: shown above it.
        share: share of the width, next to others of one block.
    """

    figure: Any
    caption: str = ""
    share: int = 1


@dataclass(frozen=True)
class Block:
    """Everything that belongs to one result.

    Attributes:
        legend: of lines and marks in the charts: their look (a class of page.css, or a colour) and their meaning.
    """

    heading: str = ""
    lines: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    legend: tuple[tuple[str, str], ...] = ()
    table: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Section:
    """One question, how to read the answer, and the answers."""

    anchor: str
    title: str
    reading: str
    blocks: tuple[Block, ...]


Maker: TypeAlias = Callable[[Inputs, Colours], "Section | None"]
