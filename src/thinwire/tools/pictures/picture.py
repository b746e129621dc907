"""A picture as plain data: the ``"picture"`` of a result's JSON, from which ``thinwire report`` draws it again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Series:
    """Points that belong together, in one colour.

    Attributes:
        name: a method, an algorithm, a node; it has one colour in all panels, and in a whole report.
        x, y: coordinates of its points.
        look: "line", "steps" (each value holds until the next), or "points".
        at: a point that is marked.
        said: text after the name in the legend.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    look: str = "line"
    at: tuple[float, float] | None = None
    said: str = ""

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ValueError(f"the line {self.name!r} has {len(self.x)} x values and {len(self.y)} y values")
        if self.look not in LOOKS:
            raise ValueError(f"the line {self.name!r}: look={self.look!r} is not one of {', '.join(LOOKS)}")

    @property
    def label(self) -> str:
        """Text for the legend."""
        return f"{self.name}: {self.said}" if self.said else self.name


LOOKS = ("line", "steps", "points")


@dataclass(frozen=True)
class Mark:
    """An event at one place of the x axis."""

    x: float
    text: str


@dataclass(frozen=True)
class Level:
    """A value to compare with: a target, chance, a limit."""

    y: float
    text: str


@dataclass(frozen=True)
class Panel:
    """Lines over one pair of axes.

    Attributes:
        x, y: the names of the axes, with their units.
        lines: what is drawn.
        marks, levels: vertical and horizontal lines with words.
        y_range: from and to; None: as the lines need.
        log_x: a logarithmic x axis.
    """

    x: str
    y: str
    lines: tuple[Series, ...]
    marks: tuple[Mark, ...] = ()
    levels: tuple[Level, ...] = ()
    y_range: tuple[float, float] | None = None
    log_x: bool = False


@dataclass(frozen=True)
class Picture:
    """Panels side by side, at most two in a row."""

    title: str
    panels: tuple[Panel, ...]

    def names(self) -> Iterator[str]:
        """Names of all lines."""
        for panel in self.panels:
            for line in panel.lines:
                yield line.name
