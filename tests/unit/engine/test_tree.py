"""The engine's files in CONTRIBUTING.md: all of them, each below what it imports, so there are no circles."""

import ast
import re
from pathlib import Path

import thinwire

ENGINE = Path(thinwire.__file__).parent / "engine"
PAGE = Path(__file__).parents[3] / "CONTRIBUTING.md"


def _imported(path):
    """Modules of the engine that a file imports anywhere, for types too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("thinwire.engine."):
            module = node.module.removeprefix("thinwire.engine.").replace(".", "/")
            below = [f"{module}/{name.name}.py" for name in node.names]
            found |= {f"{module}.py", *below} & {str(file.relative_to(ENGINE)) for file in ENGINE.rglob("*.py")}
    return found


def test_every_file_is_below_what_it_imports():
    table = PAGE.read_text().split("\n## The engine's files\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([\w/]+\.py)` \|", table, re.M)
    assert sorted(rows) == sorted(
        str(file.relative_to(ENGINE)) for file in ENGINE.rglob("*.py") if file.name != "__init__.py"
    )
    for place, row in enumerate(rows):
        assert _imported(ENGINE / row) <= set(rows[:place]), row
