"""``thinwire reproduce``: figures, a verdict, a file that keeps what was not asked for again."""

import json

import pytest
from typer.testing import CliRunner

from thinwire.systems.papers import NAMES, acp
from thinwire.systems.papers.paper import Shown, paper
from thinwire.tools.cli.main import app


def run(*words):
    return CliRunner().invoke(app, ["reproduce", *map(str, words)])


@pytest.fixture
def _quick(monkeypatch):
    """ACP-SGD's paper with figures in place of what is measured in a minute."""

    def measured(bench):
        bench.tell("a bench")
        yield Shown("S-SGD measured", "S-SGD over ACP-SGD, here", 4.0)
        yield Shown("to a loss", "seconds to a loss, S-SGD over ACP-SGD, here", 2.0)
        yield Shown("loss", "loss of ACP-SGD over S-SGD's, here", 1.0)

    monkeypatch.setattr(acp, "measured", measured)


@pytest.mark.usefixtures("_quick")
def test_what_was_found_is_told_and_kept_beside_what_is_there(tmp_path):
    out = tmp_path / "claims.json"
    out.write_text('{"dear": {"word": "holds"}}')
    done = run("acp", "--out", out)
    assert done.exit_code == 0
    for words in (
        "ACP-SGD",
        "4.06",
        "S-SGD over ACP-SGD, here",
        "measured",
        "a step at 10 Gb/s is 4.59 times as fast",
        "2306.08881",
    ):
        assert words in done.stdout.replace("\n", " "), done.stdout
    kept = json.loads(out.read_text())
    assert list(kept) == ["dear", "acp"]
    assert kept["acp"]["word"] == "holds"
    assert {one["how"] for one in kept["acp"]["shown"]} == {"simulated", "measured"}
    told = run("acp", "--json", "--out", out)
    assert json.loads(told.stdout)["acp"]["shown"] == kept["acp"]["shown"]


def test_what_is_simulated_alone_is_not_judged_and_not_kept(tmp_path):
    out = tmp_path / "claims.json"
    done = run("acp", "--simulated", "--out", out)
    assert done.exit_code == 0
    assert "not judged: nothing was measured" in done.stdout
    assert not out.exists()


def test_wrong_words_are_refused_before_the_work(tmp_path):
    not_ours = tmp_path / "claims.json"
    not_ours.write_text("[1, 2]")
    for words, says in (
        (["acd"], "no paper is called 'acd'; did you mean 'acp'? there are omgs, lags,"),
        (["acp", "--out", not_ours], "holds something else than results of thinwire reproduce"),
        (["acp", "--out", tmp_path / "no" / "folder.json"], "give a file in a folder that exists"),
    ):
        done = run(*words)
        assert done.exit_code == 2, done.output
        assert says in done.output.replace("\n", " ")
    assert not_ours.read_text() == "[1, 2]"


@pytest.mark.parametrize("name", NAMES)
def test_every_paper_says_whose_it_is_and_what_it_claims(name):
    told = paper(name)
    assert told.link.startswith("https://")
    for words in (told.title, told.authors, told.claim, told.setting):
        assert len(words) > 10
