"""What pages hold of records and of the source is what ``python docs/made.py`` makes of them."""

import re

import made
import pytest


@pytest.mark.parametrize("page", made.pages(), ids=lambda page: page.name)
def test_pages_hold_what_is_recorded(page):
    text = page.read_text()
    assert made.filled(text) == text, "run: python docs/made.py"
    assert text.count("<!-- made: ") == text.count("<!-- /made -->") == len(made.PLACE.findall(text))
    assert not re.search(r"^\s*<!-- made: figure", text, re.MULTILINE), "a line that begins so ends the paragraph"


def test_every_maker_is_used():
    used = {place[1].split()[0] for page in made.pages() for place in made.PLACE.findall(page.read_text())}
    assert used == set(made.MAKERS)


def test_an_old_figure_is_replaced_and_an_unknown_one_named():
    mark = "<!-- made: figure kfac: mlp, 1gbit:\n  spd / mpd, step -->"
    assert made.filled(f"It takes {mark}9.99<!-- /made --> times.") == f"It takes {mark}1.02<!-- /made --> times."
    with pytest.raises(ValueError, match="no recorded figure"):
        made.filled("<!-- made: figure kfac: no such claim --><!-- /made -->")
    with pytest.raises(ValueError, match="makes no such thing"):
        made.filled("<!-- made: tables --><!-- /made -->")
