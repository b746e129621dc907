"""What pages hold that is made of records or of the source: ``python docs/made.py`` writes all of it anew.

Each place stands between two marks, which neither a forge nor the built site shows. The first says what is made:

    <!-- made: methods -->
    | method | ...
    <!-- /made -->

``MAKERS`` has what the first word of a mark stands for; the other words are for its maker. A mark inside a sentence
gets one figure, and its words may wrap: "takes <!-- made: figure kfac: ... -->0.6<!-- /made --> times as long". A line
may not begin with such a mark, which would end the paragraph.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import method_tables
import papers
import recorded
import run_tables

ROOT = Path(__file__).parents[1]
PLACE = re.compile(r"(<!-- made: (.+?) -->)(.*?)(<!-- /made -->)", re.DOTALL)


def peers(name: str) -> str:
    """A table of ``benchmarks/peers``, which is none of the package."""
    sys.path.append(str(ROOT / "benchmarks" / "peers"))
    try:
        import page
    finally:
        sys.path.pop()
    return page.summary()


MAKERS: dict[str, Callable[[str], str]] = {
    "figure": recorded.figure,
    "long_runs": run_tables.table,
    "methods": lambda _: method_tables.table(),
    "papers": lambda _: papers.sections(),
    "peers": peers,
    "recorded": recorded.made,
}


def pages() -> list[Path]:
    """All that may have such places."""
    folders = (ROOT / "docs", ROOT / "docs" / "methods", recorded.RESULTS)
    return [ROOT / "README.md", *(p for f in folders for p in sorted(f.glob("*.md")))]


def filled(text: str) -> str:
    """A page with all its places made anew.

    Raises:
        ValueError: nothing of that name can be made.
    """

    def one(place: re.Match[str]) -> str:
        kind, _, rest = " ".join(place[2].split()).partition(" ")
        if kind not in MAKERS:
            raise ValueError(f"<!-- made: {kind} -->: docs/made.py makes no such thing")
        made = MAKERS[kind](rest).strip()
        return place[1] + (made if kind == "figure" else f"\n\n{made}\n\n") + place[4]

    return PLACE.sub(one, text)


if __name__ == "__main__":
    for each in pages():
        before = each.read_text(encoding="utf-8")
        if (after := filled(before)) != before:
            each.write_text(after, encoding="utf-8")
            print(f"written: {each}")
