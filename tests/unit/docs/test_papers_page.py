"""Every paper has its recorded results, and their verdicts follow from the figures."""

import papers

from thinwire.systems.papers import NAMES
from thinwire.systems.papers.paper import file_of


def test_every_paper_is_there():
    assert tuple(papers.results()) == NAMES


def test_verdicts_are_those_of_the_recorded_figures():
    """A changed rule or sentence needs no new run: ``judge`` makes both of the figures."""
    for name, found in papers.results().items():
        told = file_of(name)
        assert (found.word, found.why) == told.judge({one.key: one.value for one in found.shown}), name
        assert told.PAPER.main.keys() <= {one.key for one in found.shown}
