"""The page "Papers: what holds": ``python docs/papers.py`` writes it from ``benchmarks/results/claims.json``.

``thinwire reproduce --out benchmarks/results/claims.json`` measures that file anew.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from thinwire.core.records import made
from thinwire.systems.papers import NAMES
from thinwire.systems.papers.paper import Reproduced, paper
from thinwire.tools.pictures import write_picture

DOCS = Path(__file__).parent
PAGE = DOCS / "papers.md"
PICTURES = 1  # of a paper
RESULTS = DOCS.parent / "benchmarks" / "results" / "claims.json"
HEAD = """# Papers: what holds

thinwire implements eleven papers. This page says, for those who know them, what each claims, what of it holds here, and
which command shows it. *Simulated* figures are at the paper's scale, by the planner, with published or assumed
constants, none of which is fitted to the result. *Measured* figures come from real ranks on an emulated network, in the
small. An x counts how many times as fast; more is better. thinwire's own rule makes the verdict of both, so your
machine may come to another one:

```
pip install 'thinwire[papers]'  # what their data and models need
thinwire reproduce              # all of them, in at most half an hour
thinwire reproduce acp dear     # some
thinwire reproduce --simulated  # only what is simulated, in half a minute
```

The command shows more figures than this page. `--full` takes longer runs and more seeds. The figures below are those of
two cores of a server. [Differences](differences.md) lists where thinwire departs from the papers.
"""
SHORT = {
    "holds": "holds",
    "holds where": "holds in part",
    "does not hold:": "does not hold",
}


def results() -> dict[str, Reproduced]:
    """Those of the file, in the order of the page."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    return {name: made(Reproduced, found[name]) for name in NAMES if name in found}


def page(found: dict[str, Reproduced]) -> str:
    """The whole page as Markdown."""
    rows = ["| system | the paper claims | verdict |", "|---|---|---|"]
    for name, result in found.items():
        told = paper(name)
        rows.append(
            f"| [{told.system}](#{slug(told.system)}) | {told.claim} | **{SHORT[result.word]}** |"
        )
    return "\n".join([HEAD, *rows, "", *(section(one) for one in found.values())])


def slug(heading: str) -> str:
    """What myst, and forges, make of a heading for links."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def section(result: Reproduced) -> str:
    """One paper: verdict, whose it is, and its main figures."""
    told = paper(result.name)
    verdict = result.verdict
    word, rest = verdict[: len(result.word)], verdict[len(result.word) :]
    command = f"thinwire reproduce {result.name}" + (" --full" if result.full else "")
    lines = [
        f"({result.name})=",  # so other pages' links are short
        f"## {told.system}",
        "",
        f"**{word.capitalize()}**{rest}.",
        "",
        f"{told.authors}: [{told.title}]({told.link}).",
        f"{told.setting[0].upper()}{told.setting[1:]}. Here: [{told.page.partition('#')[0]}]({told.page}).",
        "",
        f"```\n{command}\n```",
        "",
        "| claim | published | here | |",
        "|---|---|---|---|",
    ]
    shown = {one.key: one for one in result.shown}
    for key, what in told.main.items():
        one = shown[key]
        here = f"{one.value:.3g} {one.unit}".strip()
        lines.append(f"| {what} | {one.published or '-'} | {here} | {one.how} |")
    lines.append("")
    for number, picture in enumerate(result.pictures[:PICTURES]):
        lines += [
            f"![{picture.title}](images/papers/{result.name}-{number}.png)",
            "",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    made_of = results()
    PAGE.write_text(page(made_of), encoding="utf-8")
    (DOCS / "images" / "papers").mkdir(exist_ok=True)
    for one in made_of.values():
        for place, drawn in enumerate(one.pictures[:PICTURES]):
            write_picture(drawn, DOCS / "images" / "papers" / f"{one.name}-{place}.png")
    print(f"written: {PAGE}")
