"""What pages quote is there: error sentences, and what a verb answers. Methods say how they differ from papers."""

import importlib
import re
from pathlib import Path

import pytest
import sentences

from thinwire.core.methods.registry import METHODS, Preset
from verbs import call

DOCS = Path(__file__).parents[3] / "docs"
SOURCE = DOCS.parent / "src" / "thinwire"
QUOTED = re.compile(r'^\*\*"(.+)"\*\*\\$', re.MULTILINE)  # a line of its own, which ends in a hard break


@pytest.fixture(scope="module")
def all_sentences():
    return [s for path in sorted(SOURCE.rglob("*.py")) for s in sentences.sentences(path)]


def test_quoted_errors_are_raised_like_this(all_sentences):
    quotes = QUOTED.findall((DOCS / "troubleshooting.md").read_text())
    assert len(quotes) > 25
    gone = [quote for quote in quotes if not any(quote in sentence for sentence in all_sentences)]
    assert not gone, "the source does not say this any more:\n" + "\n".join(gone)


def test_a_quotation_that_is_not_there_is_noticed(all_sentences):
    assert not any("the exchange has failed at step ..." in sentence for sentence in all_sentences)


def test_values_in_sentences_become_gaps(tmp_path):
    file = tmp_path / "a.py"
    file.write_text('def f(x):\n    raise ValueError(f"{x} is {x!r:>3}, " "not " f"{x}")\n"never raised this"\n')
    assert list(sentences.sentences(file, raised=True)) == ["... is ..., not ..."]
    assert "never raised this" in list(sentences.sentences(file))


def test_every_method_says_how_it_differs_from_its_paper():
    homes = {row.home if isinstance(row, Preset) else row for row in METHODS.values()}
    for module in {home.partition(":")[0] for home in homes}:
        assert "Differences from" in Path(importlib.import_module(module).__file__).read_text(), module


@pytest.mark.slow  # prices sixteen methods
@pytest.mark.parametrize("page", ["quickstart.md", "plan.md"])
def test_the_first_answer_is_what_the_verb_says(page):
    text = (DOCS / page).read_text()
    command = re.search(r"^thinwire (plan resnet50 .+)$", text, re.MULTILINE)[1]
    said = " ".join(call(*command.split()).output.split())
    assert " ".join(re.search(r"^use .*?(?=```)", text, re.DOTALL | re.MULTILINE)[0].split()) in said
    worth, ddp = re.search(r"reach the loss (\S+) times as soon as one alone \(DDP: (\S+)\)", said).groups()
    readme = " ".join((DOCS.parent / "README.md").read_text().split())
    assert re.search(rf"are worth {ddp}( of one machine alone with DDP,)? and {worth}[ .]", readme)
    for row in re.findall(r"^ .+ [\d.]+-[\d.]+ .+$", text, re.MULTILINE):  # of the table: a band
        assert " ".join(row.split()) in said


@pytest.mark.slow  # prices sixteen methods
def test_the_answer_where_the_workers_do_not_pay():
    quoted = re.search(r"^use one worker alone.*?(?=```)", (DOCS / "plan.md").read_text(), re.DOTALL | re.MULTILINE)[0]
    said = call("plan", "resnet50", "--link", "100mbit", "--workers", "4").output
    assert " ".join(said.split()).startswith(" ".join(quoted.split()))
