"""The tables of methods: ``python docs/method_tables.py`` writes them into ``docs/methods/index.md``.

What a method declares, and what its program sends, comes from the registry. What it means for a user stands in its
page, in comments of this form, one for each row; the lines "options" to "call", and "sent", are for some rows only:

    <!-- in the index
    options: dtype=int8
    title: int8
    call: `dtype="int8"`
    bytes: 2 d (P - 1) / P
    exchange: all-to-all, all-gather
    when: up to four times too slow
    sends: codes of 8 bits
    sent: depends
    pays: a link up to four times too slow
    loses: it costs CPU time
    -->

The row's figures are made with "options" and those of ``USUAL`` that the method needs. "title" and "call" stand behind
its name in the first and in the second table, "sent" in place of the computed MB.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import nn

from thinwire.core.methods.registry import METHODS, class_of, method, needed
from thinwire.core.methods.ssgd import SSGD
from thinwire.core.program import Method, Topology
from thinwire.core.program.trace import memory
from thinwire.engine.controller.planning import make_plan, trace_plan
from thinwire.engine.parameters import managed_parameters
from thinwire.tools.bench.models.text import CharGPT
from thinwire.tools.bench.words import split_options

FOLDER = Path(__file__).parent / "methods"
FIRST = (
    "P workers, a tensor of d fp32 elements or a matrix n x m; bytes that one worker sends per step.\n\n"
    "| method | bytes per step | result | exchange | keeps | when |\n|---|---|---|---|---|---|"
)
SECOND = "| method | what a worker sends | MB per step (*) | when it pays | when it loses |\n|---|---|---|---|---|"
USUAL = {"density": 0.01}
"""Options with which the figures of methods that need them are made."""

_BLOCK = re.compile(r"^<!-- in the index\n(.*?)^-->$", re.MULTILINE | re.DOTALL)
_PLACE = re.compile(r"(<!-- (table|contents): (\w+) -->\n).*?(<!-- /\2 -->)", re.DOTALL)


@dataclass(frozen=True)
class Row:
    """One row of both tables: the method, and the words of its page."""

    name: str
    method: Method
    words: dict[str, str]

    def first(self) -> str:
        """Of the table that sets methods side by side."""
        words = self.words
        title = f"[`{self.name}`]({self.name}.md)" + (
            f", {words['title']}" if words.get("title") else ""
        )
        cells = (
            title,
            words["bytes"],
            self.method.result,
            words["exchange"],
            keeps(self.method),
            words["when"],
        )
        return f"| {' | '.join(cells)} |"

    def second(self) -> str:
        """Of the table of when each pays."""
        words = self.words
        title = f'`"{self.name}"`' + (f", {words['call']}" if words.get("call") else "")
        sent = words.get("sent") or f"{megabytes(self.method):.2f}"
        return f"| {title} | {words['sends']} | {sent} | {words['pays']} | {words['loses']} |"


def rows(folder: Path = FOLDER) -> list[Row]:
    """Of all registered methods, in the registry's order.

    Raises:
        ValueError: a page has no words for the index.
    """
    found = []
    for name in METHODS:
        blocks = _BLOCK.findall((folder / f"{name}.md").read_text(encoding="utf-8"))
        if not blocks:
            raise ValueError(
                f"{folder / name}.md has no comment 'in the index': see docs/method_tables.py"
            )
        for block in blocks:
            words = dict(
                re.split(r":\s+", line, maxsplit=1) for line in block.splitlines()
            )
            found.append(Row(name, usual(name, words.get("options", "")), words))
    return found


def usual(name: str, more: str = "") -> Method:
    """The method with the options of the figures."""
    _, options = split_options(f"{name}:{more}" if more else name)
    return method(
        name,
        **{
            option: USUAL[option]
            for option in needed(class_of(name))
            if option in USUAL
        }
        | options,
    )


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


def keeps(chosen: Method) -> str:
    """What the program remembers of a matrix from step to step."""
    state = memory(
        chosen, [("x", (64, 256))], Topology(4, 2), rank=0, dtype=torch.float32
    )
    residual = (
        ["residual of d / n" if chosen.shards else "residual"]
        if chosen.has_residual
        else []
    )
    fields = sorted({field for field, _ in [*state.fields, *state.locals]})
    return ", ".join([*residual, *(f"`{field}`" for field in fields)]) or "nothing"


def rendered(text: str, folder: Path = FOLDER) -> str:
    """A page with its tables made anew."""
    found = rows(folder)
    made = {
        "side_by_side": "\n".join([FIRST, *(row.first() for row in found)]),
        "when_each_pays": "\n".join([SECOND, *(row.second() for row in found)]),
        "methods": "\n".join(
            ["```{toctree}", ":maxdepth: 1", "", "common", *METHODS, "```"]
        ),
    }
    return _PLACE.sub(lambda place: f"{place[1]}\n{made[place[3]]}\n\n{place[4]}", text)


if __name__ == "__main__":
    page = FOLDER / "index.md"
    page.write_text(rendered(page.read_text(encoding="utf-8")), encoding="utf-8")
    print(page)
