"""The differences from the papers, as the docstrings say them: ``python docs/differences.py core/methods`` prints some.

The directive ``.. differences:: PACKAGE`` puts a package's into a page, so nothing is copied by hand. A docstring
takes part with a paragraph that begins "Differences from"; a list below such a paragraph belongs to it.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

SOURCE = Path(__file__).parents[1] / "src" / "thinwire"
NAMES = {
    "sign": "signsgd",
    "butterfly": "gtopk",
    "regions": "oktopk",
    "decoupling": "dear",
}
"""Files of methods that have another name."""


class Difference(NamedTuple):
    """One paragraph.

    Attributes:
        module: below ``thinwire``, for example "core.methods.acp".
        name: of the class or function; "" for a module's docstring.
        origin: from what: "the paper", "torch's hooks", ...
        text: reStructuredText.
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
    """As one paragraph or one list; a bar outside of code would be read as a substitution."""
    if text.lstrip().startswith("* "):
        items = [
            " ".join(item.split())
            for item in re.split(r"^\s*\* ", text, flags=re.MULTILINE)
            if item.strip()
        ]
        text = "\n".join(f"* {item}" for item in items)
    else:
        text = " ".join(text.split())
        text = text[:1].upper() + text[1:]
    return "".join(
        part if part.startswith("``") else part.replace("|", "\\|")
        for part in re.split(r"(``.*?``)", text)
    )


def listing(package: str) -> str:
    """As a definition list in reStructuredText."""
    lines = []
    for module, name, origin, text in collect(package):
        body = readable(text).replace("\n", "\n   ")
        other = "" if origin in ("the paper", "the papers") else f" (from {origin})"
        lines += [f"{_title(package, module, name)}{other}", f"   {body}", ""]
    return "\n".join(lines)


def _title(package: str, module: str, name: str) -> str:
    last = module.rpartition(".")[2]
    method = NAMES.get(last, last)
    if package == "core/methods" and (page := _family(method)):
        return f":doc:`{method} </methods/{page}>`"
    return f"``{name}``" if name else f"``thinwire.{module}``"


def _family(method: str) -> str:
    """The page with a method's section."""
    pages = (Path(__file__).parent / "methods").glob("*.md")
    found = (
        p.stem for p in pages if f"\n## {method}\n" in p.read_text(encoding="utf-8")
    )
    return next(found, "")


def setup(app: Any) -> None:
    """Add the directive to Sphinx, which is imported here, as the tests need none."""
    from sphinx.util.docutils import SphinxDirective

    class Differences(SphinxDirective):
        """``.. differences:: PACKAGE``"""

        required_arguments = 1

        def run(self) -> list[Any]:
            for path in (SOURCE / self.arguments[0]).rglob("*.py"):
                self.env.note_dependency(str(path))
            return self.parse_text_to_nodes(listing(self.arguments[0]))

    app.add_directive("differences", Differences)


if __name__ == "__main__":
    print("\n".join(listing(package) for package in sys.argv[1:] or ["methods"]))
