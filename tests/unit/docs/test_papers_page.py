"""The page "Papers: what holds" is what its script makes of the recorded results; every paper is on it."""

import re
from pathlib import Path

import papers

from thinwire.systems.papers import NAMES
from thinwire.systems.papers.paper import file_of

DOCS = Path(__file__).parents[3] / "docs"


def test_the_page_is_made_from_the_record():
    found = papers.results()
    assert tuple(found) == NAMES
    assert papers.page(found) == papers.PAGE.read_text()


def test_every_verdict_is_reached_from_the_readme_and_every_page_exists():
    page = papers.PAGE.read_text()
    assert "docs/papers.md" in (DOCS.parent / "README.md").read_text()
    for target in re.findall(r"\]\(([\w/-]+\.(?:md|png))(?:#\w+)?\)", page):
        assert (DOCS / target).is_file(), target


def test_verdicts_are_those_of_the_recorded_figures():
    """A changed rule or sentence needs no new run: ``judge`` makes both of the figures."""
    for name, found in papers.results().items():
        told = file_of(name)
        assert (found.word, found.why) == told.judge({one.key: one.value for one in found.shown}), name
        assert told.PAPER.main.keys() <= {one.key for one in found.shown}
