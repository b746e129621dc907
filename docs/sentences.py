"""The sentences of the source: every text of ``src/thinwire``, with ... where a value goes.

``python docs/sentences.py PACKAGE`` prints those that are raised; the tests hold quotations in the pages against all.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "thinwire"
GAP = "..."


def text_of(node: ast.AST) -> str | None:
    """A text in source as one string; None for what is none. Values of f-strings become ``...``."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = [
            text_of(part) if isinstance(part, ast.Constant) else GAP
            for part in node.values
        ]
        return "".join(part or "" for part in parts)
    return None


def sentences(path: Path, raised: bool = False) -> Iterator[str]:
    """Every text of a file, or only those inside ``raise``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    waiting: list[ast.AST] = (
        [n for n in ast.walk(tree) if isinstance(n, ast.Raise)] if raised else [tree]
    )
    while waiting:
        node = waiting.pop()
        text = text_of(node)
        if text is None:
            waiting += reversed(list(ast.iter_child_nodes(node)))
        elif " " in text:
            yield text


if __name__ == "__main__":
    for package in sys.argv[1:] or [""]:
        for file in sorted((SOURCE / package).rglob("*.py")):
            for sentence in sentences(file, raised=True):
                print(f"{file.relative_to(SOURCE)}: {sentence}")
