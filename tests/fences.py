"""Blocks of code in a page."""

import re
from collections.abc import Iterator
from typing import NamedTuple

COMMAND = re.compile(r"(\w+=\S+ )*(thinwire|python|torchrun|make|pip|cd|accelerate|srun|kubectl) ")


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


def commands(block: Block) -> list[str]:
    """The lines of a block that a shell runs, without remarks, on one line each."""
    if block.language not in ("", "sh"):
        return []
    lines = (line.split("  #")[0] for line in block.code.replace("\\\n", " ").splitlines())
    return [line for line in (re.sub(r"\s+", " ", line).strip() for line in lines) if COMMAND.match(line)]


def outputs(text: str) -> dict[str, str]:
    """The commands of a page, and what it shows under the block that each is in; "": nothing."""
    found: dict[str, str] = {}
    last: list[str] = []
    for block in blocks(text):
        here = commands(block)
        if last and not here and block.language in ("", "text"):
            found.update(dict.fromkeys(last, block.code))
        found.update({command: "" for command in here if command not in found})
        last = here
    return found
