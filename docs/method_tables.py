"""The table of methods in ``docs/methods/index.md``.

What a method is called and gives, and what its program sends, comes from the registry. What it means for a user stands
in the page of its family, in comments of this form, one for each row. "result" and "sent" replace what is computed:

    <!-- in the index
    method: cast
    options: dtype=int8
    result: late
    sent: depends
    when: a link up to four times too slow
    -->

The row's figure is made with "options" and those of ``USUAL`` that the method needs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from torch import nn

from thinwire.core.methods.registry import METHODS, class_of, method, needed
from thinwire.core.methods.ssgd import SSGD
from thinwire.core.program import Method, Topology
from thinwire.engine.controller.planning import make_plan, trace_plan
from thinwire.engine.local.settings import PRESETS
from thinwire.engine.parameters import managed_parameters
from thinwire.tools.bench.models.text import CharGPT
from thinwire.tools.bench.words import split_options

FOLDER = Path(__file__).parent / "methods"
HEAD = "| method | result | MB per step (*) | when to use it |\n|---|---|---|---|"
USUAL = {"density": 0.01}
"""Options with which the figures of methods that need them are made."""

_BLOCK = re.compile(r"^<!-- in the index\n(.*?)^-->$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Row:
    """One row: the words of a comment, and the page of the family that it stands in."""

    page: str
    words: dict[str, str]

    @property
    def name(self) -> str:
        return self.words["method"]

    def line(self) -> str:
        words = {**self.made(), **self.words}
        title = f"[`{self.name}`]({self.page}#{self.name})"
        if options := words.get("options"):
            title += f", `{options}`"
        return f"| {title} | {words['result']} | {words['sent']} | {words['when']} |"

    def made(self) -> dict[str, str]:
        """What the registry and the program say; nothing of local steps."""
        if self.name not in METHODS:
            return {}
        chosen = usual(self.name, self.words.get("options"))
        return {"result": chosen.result, "sent": f"{megabytes(chosen):.2f}"}


def rows(folder: Path = FOLDER) -> list[Row]:
    """Of all registered methods and of local steps: families together, else in the registry's order.

    Raises:
        ValueError: no page has words of a method.
    """
    found = [
        Row(page.name, dict(re.split(r":\s+", line, maxsplit=1) for line in words))
        for page in sorted(folder.glob("*.md"))
        for block in _BLOCK.findall(page.read_text(encoding="utf-8"))
        for words in [block.splitlines()]
    ]
    names = [*METHODS, *PRESETS]
    for name in names:
        if name not in (row.name for row in found):
            raise ValueError(
                f"no page of {folder} has a comment 'in the index' with method: {name}"
            )
    found.sort(key=lambda row: names.index(row.name))
    families = list(dict.fromkeys(row.page for row in found))
    return sorted(found, key=lambda row: families.index(row.page))


def usual(name: str, more: str | None = None) -> Method:
    """The method with the options of the figures."""
    _, options = split_options(f"{name}:{more}" if more else name)
    given = {
        option: USUAL[option] for option in needed(class_of(name)) if option in USUAL
    }
    return method(name, **given | options)


@cache
def _model() -> nn.Module:
    return CharGPT()


def megabytes(chosen: Method) -> float:
    """What one of 4 workers sends per step of the bench's small GPT; the mean over the phases."""
    managed = managed_parameters(_model(), chosen, "auto")
    plan = make_plan(chosen, managed, range(len(managed)), (), "gloo")
    traced = trace_plan(plan, chosen, SSGD(), managed, Topology(4), 0)
    return (
        sum(step.sent_bytes for phase in traced for bucket in phase for step in bucket)
        / len(traced)
        / 1e6
    )


def table(folder: Path = FOLDER) -> str:
    """As Markdown."""
    return "\n".join([HEAD, *(row.line() for row in rows(folder))])
