"""Blocks of code in a page."""

import re
from collections.abc import Iterator
from typing import NamedTuple


class Block(NamedTuple):
    """What stands between two fences: its language, its text, the line above it."""

    language: str
    code: str
    above: str


def blocks(text: str) -> Iterator[Block]:
    """All of a page, in order."""
    fence, language, above, code = "", "", "", []
    before = ""
    for line in text.splitlines():
        if fence and line == fence:
            yield Block(language, "".join(f"{line}\n" for line in code), above)
            fence = ""
        elif fence:
            code.append(line)
        elif found := re.match(r"(`{3,})(\S*)", line):
            fence, language, above, code = found[1], found[2], before, []
        before = line
