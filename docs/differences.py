"""The differences from the papers, as the docstrings say them, for ``python docs/made.py``.

A docstring takes part with a paragraph that begins "Differences from"; a list below such a paragraph belongs to it.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parents[1] / "src" / "thinwire"


class Difference(NamedTuple):
    """One paragraph.

    Attributes:
        module: below ``thinwire``, for example "core.methods.acp".
        name: of the class or function; "" for a module's docstring.
        origin: from what: "the paper", "torch's hooks", ...
        text: as the docstring has it.
    """

    module: str
    name: str
    origin: str
    text: str


def collect(package: str) -> list[Difference]:
    """Those of a package, for example "core/methods", in the order of its files."""
    found = []
    for path in sorted((SOURCE / package).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "Differences from" not in text:
            continue
        tree = ast.parse(text)
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(
            ".__init__"
        )
        nodes = [
            n
            for n in ast.walk(tree)
            if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef))
        ]
        for node in nodes:
            name = "" if isinstance(node, ast.Module) else node.name
            found += [
                Difference(module, name, *parts)
                for parts in paragraphs(ast.get_docstring(node) or "")
            ]
    return found


def paragraphs(docstring: str) -> list[tuple[str, str]]:
    """(origin, text) of every such paragraph."""
    blocks = re.split(r"\n\s*\n", docstring)
    found = []
    for block, after in zip(blocks, [*blocks[1:], ""]):
        for match in re.finditer(
            r"Differences from (?P<origin>[^:]+):(?P<text>.*)", block, re.DOTALL
        ):
            text = match["text"].strip()
            found.append((" ".join(match["origin"].split()), text or after))
    return found


def readable(text: str) -> str:
    """As one paragraph or one list of Markdown."""
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", text.replace("``", "`"))
    if text.lstrip().startswith("* "):
        items = re.split(r"^\s*\* ", text, flags=re.MULTILINE)
        return "\n".join(f"* {' '.join(i.split())}" for i in items if i.strip())
    text = " ".join(text.split())
    return text[:1].upper() + text[1:]


def listing(package: str) -> str:
    """A package's, as Markdown."""
    lines = []
    for module, name, origin, text in collect(package):
        other = "" if origin in ("the paper", "the papers") else f", from {origin}"
        lines.append(
            f"* **`{name or module.rpartition('.')[2]}`**{other}: {readable(text)}"
        )
    return "\n".join(lines)
