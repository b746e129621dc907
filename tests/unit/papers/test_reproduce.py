"""``thinwire reproduce``: figures, a verdict, a file that keeps what was not asked for again."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from thinwire.systems.papers import NAMES, acp, omgs, parrot
from thinwire.systems.papers.paper import Shown, paper
from thinwire.tools.cli.console import RunFailed
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
        "times as fast as S-SGD, seconds to a loss",
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


def test_an_extra_that_is_missing_is_named_before_any_paper_runs(tmp_path, monkeypatch):
    lacking = replace(parrot.PAPER, needs={"digits": ("torch",), "federated": ("torch", "no_such_module")})
    monkeypatch.setattr(parrot, "PAPER", lacking)
    done = run("acp", "parrot", "--out", tmp_path / "claims.json")
    assert done.exit_code == 2
    assert "to measure parrot: pip install 'thinwire[federated]';" in " ".join(done.output.split())
    assert "S-SGD" not in done.output
    assert run("parrot", "--simulated").exit_code == 0


@pytest.mark.usefixtures("_quick")
def test_a_paper_that_fails_does_not_end_the_others(tmp_path, monkeypatch):
    def measured(bench):
        raise RunFailed("the ranks ended with exit code 1")
        yield

    monkeypatch.setattr(omgs, "measured", measured)
    out = tmp_path / "claims.json"
    done = run("omgs", "acp", "--out", out)
    assert done.exit_code == 1
    assert "omgs failed: the ranks ended with exit code 1" in done.output
    assert list(json.loads(out.read_text())) == ["acp"]


@pytest.mark.usefixtures("_quick")
def test_figures_of_the_page_come_first_under_its_names(tmp_path):
    told = " ".join(run("acp", "--out", tmp_path / "claims.json").stdout.split())
    last = told.index(f"{[*acp.PAPER.main.values()][-1].partition(';')[0]}")
    assert last < told.index("Power-SGD in one bucket over ACP-SGD, mean")
