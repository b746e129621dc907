"""A paper's claim, the figures shown for it, and the verdict that follows from them."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from thinwire.core.checks import meant
from thinwire.core.records import Record
from thinwire.systems.papers import NAMES
from thinwire.systems.papers.workbench import Workbench
from thinwire.tools.pictures import Panel, Picture, Series

Word = Literal["holds", "holds where", "does not hold:", "not judged:"]


@dataclass(frozen=True)
class Shown:
    """One figure of ours.

    Attributes:
        key: what the paper's rule calls it.
        what: of what it is, with model, workers and link.
        published: the paper's own figure for it; "" where it gives none.
        how: by which function of the paper's file it was yielded.
    """

    key: str
    what: str
    value: float
    unit: str = "x"
    published: str = ""
    how: Literal["simulated", "measured"] = "simulated"


@dataclass(frozen=True)
class Reproduced(Record):
    """What ``thinwire reproduce`` found for one paper."""

    called: ClassVar[str] = "what thinwire reproduce found for a paper"

    name: str
    word: Word
    why: str
    shown: list[Shown]
    seconds: float
    full: bool
    pictures: list[Picture] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """The word and what it rests on, as one text."""
        return f"{self.word}{':' * (self.word == 'holds')} {self.why}"


@dataclass(frozen=True)
class Paper:
    """What a paper says, and where the docs explain it.

    Attributes:
        claim: in the paper's own terms, with its figure.
        setting: model, workers, network of that figure.
        page: of the docs, where the system is explained.
        main: the figures that docs/papers.md shows: key -> what it is of, in a few words.
        needs: what to measure takes that thinwire alone does not bring: extra -> modules.
    """

    system: str
    title: str
    authors: str
    link: str
    claim: str
    setting: str
    page: str
    main: Mapping[str, str]
    needs: Mapping[str, Sequence[str]] = field(default_factory=dict)


def curves(title: str, x: str, y: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> Picture:
    """Draw lines, label -> (x, y) points, where they say more than a figure."""
    series = (
        Series(label, tuple(a for a, _ in points), tuple(b for _, b in points)) for label, points in lines.items()
    )
    return Picture(title, (Panel(x, y, tuple(series)),))


def file_of(name: str) -> Any:
    """Return the file of a paper of :data:`NAMES`: its ``PAPER``, and three functions.

    * ``simulated()`` yields figures at the paper's scale, in seconds, without ranks.
    * ``measured(bench)`` yields figures measured on this machine, in at most three minutes, and pictures.
    * ``judge(figures by key)`` returns the verdict's word and the rest of its sentence.
    """
    if name not in NAMES:
        raise ValueError(f"no paper is called {name!r}; {meant(name, NAMES)}there are {', '.join(NAMES)}")
    return importlib.import_module(f"thinwire.systems.papers.{name}")


def paper(name: str) -> Paper:
    found: Paper = file_of(name).PAPER
    return found


def reproduce(name: str, bench: Workbench | None) -> Reproduced:
    """Show what holds of a paper; ``bench`` None: only what can be simulated, without a verdict."""
    asked, began = file_of(name), time.monotonic()
    shown, pictures = list(asked.simulated()), list[Picture]()
    for one in asked.measured(bench) if bench else ():
        if isinstance(one, Picture):
            pictures.append(one)
        else:
            shown.append(replace(one, how="measured"))
    word: Word
    word, why = asked.judge({one.key: one.value for one in shown}) if bench else ("not judged:", "nothing was measured")
    full = bench is not None and bench.full
    return Reproduced(name, word, why, shown, time.monotonic() - began, full, pictures)
