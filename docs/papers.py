"""What "Papers: what holds" says of each paper, and its pictures: ``python docs/papers.py`` draws them.

Both are of ``benchmarks/results/claims.json``.
``thinwire reproduce --out benchmarks/results/claims.json`` measures that file anew.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from thinwire.core.records import made
from thinwire.systems.papers import NAMES
from thinwire.systems.papers.paper import Paper, Reproduced, paper
from thinwire.tools.pictures import write_picture

DOCS = Path(__file__).parent
PICTURES = 1  # of a paper
RESULTS = DOCS.parent / "benchmarks" / "results" / "claims.json"
SHORT = {
    "holds": "holds",
    "holds where": "holds in part",
    "does not hold:": "does not hold",
}


def results() -> dict[str, Reproduced]:
    """Those of the file, in the order of the page."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    return {name: made(Reproduced, found[name]) for name in NAMES if name in found}


def sections() -> str:
    """As Markdown: a table of all, and a section of each."""
    found = results()
    rows = ["| system | the paper claims | verdict |", "|---|---|---|"]
    for name, result in found.items():
        told = paper(name)
        rows.append(
            f"| [{told.system}](#{slug(told.system)}) | {told.claim} | **{SHORT[result.word]}** |"
        )
    return "\n".join([*rows, "", *(section(one) for one in found.values())])


def slug(heading: str) -> str:
    """What myst, and forges, make of a heading for links."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def source(told: Paper) -> str:
    """The first author, and where it appeared, with its address."""
    found = re.fullmatch(r"(.+?)(, .+)? \((.+)\)", told.authors)
    if found is None:
        return f"[{told.authors}]({told.link})"
    return f"{found[1]}{' and others' if found[2] else ''}, [{found[3]}]({told.link})"


def section(result: Reproduced) -> str:
    """One paper: verdict, whose it is, and its main figures."""
    told = paper(result.name)
    verdict = result.verdict
    word, rest = verdict[: len(result.word)], verdict[len(result.word) :]
    command = f"thinwire reproduce {result.name}" + (" --full" if result.full else "")
    lines = [
        f"## {told.system}",
        "",
        f"**{word.capitalize()}**{rest}.",
        "",
        f"{source(told)}. "
        f"{told.setting[0].upper()}{told.setting[1:]}. Here: [{told.page.partition('#')[0]}]({told.page}).",
        "",
        f"```\n{command}\n```",
        "",
        "| claim | published | here |",
        "|---|---|---|",
    ]
    shown = {one.key: one for one in result.shown}
    for key, what in told.main.items():
        one = shown[key]
        here = f"{one.value:.3g} {one.unit}".strip()
        lines.append(f"| {what} | {one.published or '-'} | {here}, {one.how} |")
    lines.append("")
    for number, picture in enumerate(result.pictures[:PICTURES]):
        lines += [
            f"![{picture.title}](images/papers/{result.name}-{number}.png)",
            "",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    for one in results().values():
        for place, drawn in enumerate(one.pictures[:PICTURES]):
            path = DOCS / "images" / "papers" / f"{one.name}-{place}.png"
            write_picture(drawn, path)
            print(f"written: {path}")
