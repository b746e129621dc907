"""The page "Papers: what holds" is what its script makes of the recorded results; every paper is on it."""

import re
from pathlib import Path

import papers

from thinwire.systems.papers import NAMES

DOCS = Path(__file__).parents[3] / "docs"


def test_the_page_is_made_from_the_record():
    found = papers.results()
    assert tuple(found) == NAMES
    assert papers.page(found) == papers.PAGE.read_text()


def test_every_verdict_is_reached_from_the_readme_and_every_page_exists():
    page = papers.PAGE.read_text()
    assert "docs/papers.md" in (DOCS.parent / "README.md").read_text()
    for target in re.findall(r"\]\(([\w/]+\.(?:md|png))\)", page):
        assert (DOCS / target).is_file(), target
