"""Tables that pages include say what the planner says today: of what a step is worth, of prices, of candidates."""

import pytest
import when_it_pays
import winners


@pytest.mark.parametrize("model", winners.MODELS)
def test_who_wins_where(model):
    assert (winners.FOLDER / f"{model}.md").read_text() == winners.table(model), "run: python docs/winners.py"


@pytest.mark.parametrize("page", when_it_pays.LABELS)
def test_when_a_method_pays(page):
    told = (when_it_pays.FOLDER / f"{page}.md").read_text()
    assert told == when_it_pays.fragment(page), "run: python docs/when_it_pays.py"
