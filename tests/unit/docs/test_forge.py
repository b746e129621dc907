"""Pages are read as files on a forge, too: links and anchors lead somewhere there, and nothing stands raw."""

import re
from pathlib import Path

import papers
import pytest

from fences import blocks

ROOT = Path(__file__).parents[3]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in page.parts),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")
OF_SPHINX = re.compile(r"^\(.+\)=$|^:::|^%|\{[a-z:-]+\}`|\[\]\(", re.MULTILINE)


def prose(page):
    """A page without its blocks of code."""
    return re.sub(r"^(`{3,}).*?^\1$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page):
    """What a forge makes of the headings; of several alike the second ends in -1."""
    found = []
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        slug = papers.slug(re.sub(r"\[(.+?)\]\(.+?\)", r"\1", heading))
        found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in LINK.findall(prose(page)):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{link}: no such file"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_nothing_stands_raw(page):
    directives = {block.language for block in blocks(page.read_text()) if block.language.startswith("{")}
    assert directives == ({"{eval-rst}"} if page.name == "api.md" else set())
    assert not OF_SPHINX.findall(re.sub(r"(?<!\})`[^`]+`", "code", prose(page)))
    assert "![](" not in page.read_text(), "a picture without words"


def test_anchors_are_those_of_a_forge(tmp_path):
    page = tmp_path / "a.md"
    page.write_text("# What `x_y` is: [A](b.md), Ok-Topk\n\n```\n# none\n```\n## Same\n\n## Same\n")
    assert anchors(page) == ["what-x_y-is-a-ok-topk", "same", "same-1"]
