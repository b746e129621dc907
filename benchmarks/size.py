"""How large the project is: ``python benchmarks/size.py [REVISION ...]``.

Lines of code (without docstrings, comments, blank lines and imports), lines and files of each wing and of the tests,
beside those of the last release and of the last commit that CHANGELOG.md names, or of the revisions given. Then what
the last ``make test`` took, by folder and by test. A line of code that several statements or strings share counts once.
"""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
    tokenize.ENCODING,
}  # fmt: skip
MOST = 25
"""Folders and tests that are listed."""
Sizes = dict[str, Counter[str]]


def lines_of_code(text: str) -> int:
    """Count the lines on which a file's code stands."""
    rows: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            rows.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        docstrings = [s for s in body if _is_text(s)] if isinstance(body, list) else []
        for gone in [node, *docstrings] if isinstance(node, (ast.Import, ast.ImportFrom)) else docstrings:
            rows -= set(range(gone.lineno, (gone.end_lineno or gone.lineno) + 1))
    return len(rows)


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def sizes(revision: str | None = None) -> Sizes:
    """Return lines of code, lines and files by place; ``revision`` None: of the working tree."""
    found: Sizes = {}
    for name, text in _files(revision):
        parts = name.split("/")
        places = (
            ["tests"] if parts[0] == "tests" else ["src", "/".join(parts[:3]) if len(parts) > 3 else "src/thinwire"]
        )
        for place in places:
            row = found.setdefault(place, Counter())
            row.update(code=lines_of_code(text), lines=len(text.splitlines()), files=1)
    return found


def _files(revision: str | None) -> Iterator[tuple[str, str]]:
    if revision is None:
        for name in _git("ls-files", "src", "tests").split():
            if name.endswith(".py") and (ROOT / name).exists():
                yield name, (ROOT / name).read_text()
        return
    packed = subprocess.run(
        ["git", "archive", revision, "src", "tests"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            if member.name.endswith(".py") and (file := archive.extractfile(member)) is not None:
                yield member.name, file.read().decode()


def earlier() -> list[str]:
    """Return the last release's tag and the last commit that CHANGELOG.md names, as far as there are any."""
    tag = subprocess.run(["git", "describe", "--tags", "--abbrev=0"], cwd=ROOT, capture_output=True, text=True).stdout
    named = re.findall(r"\b[0-9a-f]{8,40}\b", (ROOT / "CHANGELOG.md").read_text())
    return [*tag.split(), *named[:1]]


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def main() -> None:
    revisions = sys.argv[1:] or earlier()
    try:
        columns = {"now": sizes()} | {revision: sizes(revision) for revision in revisions}
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: git knows no such revision: {error.stderr.decode().strip() or error}")
    print(f"{'lines of code (lines, files)':28}" + "".join(f"{name[:12]:>24}" for name in columns))
    for place in sorted({place for column in columns.values() for place in column}):
        cells = [column.get(place, Counter()) for column in columns.values()]
        texts = ["{code:,} ({lines:,}, {files})".format_map(cell) for cell in cells]  # a Counter has 0 for what is not
        print(f"{place:28}" + "".join(f"{text:>24}" for text in texts))
    last = ROOT / ".pytest_cache" / "seconds.json"
    if last.exists():
        took = json.loads(last.read_text())
        used = f"{took['wall']:,.0f} s, {took['processor']:,.0f} processor seconds"
        print(f"\nlast make test: {took['tests']:,} tests, {used}\n\nprocessor seconds of folders")
        for name, seconds in list(took["folders"].items())[:MOST]:
            print(f"{seconds:8.1f}  {name}")
        print("\n    wall  processor seconds of tests")
        for name, (wall, seconds) in list(took["longest"].items())[:MOST]:
            print(f"{wall:8.1f}{seconds:8.1f}  {name}")


if __name__ == "__main__":
    main()
