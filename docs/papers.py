"""The page "Papers: what holds": ``python docs/papers.py`` writes it from ``benchmarks/results/claims.json``.

``thinwire reproduce --out benchmarks/results/claims.json`` measures that file anew.
"""

from __future__ import annotations

import json
from pathlib import Path

from thinwire.core.records import made
from thinwire.systems.papers import NAMES
from thinwire.systems.papers.paper import Reproduced, paper
from thinwire.tools.pictures import write_picture

DOCS = Path(__file__).parent
PAGE = DOCS / "papers.md"
RESULTS = DOCS.parent / "benchmarks" / "results" / "claims.json"
HEAD = """# Papers: what holds

What each of eleven papers claims, what of it holds here, and the command that shows it. Two kinds of figures stand
beside the paper's own: *simulated* at the paper's scale (its models, workers and network) by the planner, with
published or assumed constants and none fitted to the result; and *measured* here in the small, with real ranks on an
emulated network. The verdict follows from both by a rule of thinwire, so your machine may come to another one:

```
thinwire reproduce              # all of them, in at most half an hour
thinwire reproduce acp dear     # some
thinwire reproduce --simulated  # only what is simulated, in half a minute
```

`--full` takes longer runs and more seeds, `--json` prints everything. The figures below are those of two cores of a
server. Those with an x are ratios.
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
            f"| [{told.system}](#{name}) | {told.claim} | **{SHORT[result.word]}** |"
        )
    return "\n".join([HEAD, *rows, "", *(section(one) for one in found.values())])


def section(result: Reproduced) -> str:
    """One paper."""
    told = paper(result.name)
    command = f"thinwire reproduce {result.name}" + (" --full" if result.full else "")
    lines = [
        f"({result.name})=",
        f"## {told.system}",
        "",
        f"**{result.word.capitalize()}** {result.why}.",
        "",
        f"{told.authors}: [{told.title}]({told.link}). Claim: {told.claim}; {told.setting}.",
        f"The system here: [{told.page}]({told.page}). Again, in {result.seconds / 60:.0f} min:",
        "",
        f"```\n{command}\n```",
        "",
        "| what | paper | here | |",
        "|---|---|---|---|",
    ]
    for one in result.shown:
        here = f"{one.value:.3g} {one.unit}".strip()
        lines.append(f"| {one.what} | {one.published or '-'} | {here} | {one.how} |")
    lines.append("")
    for number, picture in enumerate(result.pictures):
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
        for place, drawn in enumerate(one.pictures):
            write_picture(drawn, DOCS / "images" / "papers" / f"{one.name}-{place}.png")
    print(f"written: {PAGE}")
