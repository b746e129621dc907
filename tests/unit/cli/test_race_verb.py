"""``thinwire race``: wrong words, and models that do not train, are one sentence."""

import pytest

from thinwire.tools import lab
from thinwire.tools.cli.main import app
from verbs import CliRunner


def refused(*words):
    result = CliRunner().invoke(app, ["race", *words])
    assert result.stderr.startswith("error: "), result.output
    assert len(result.stderr.strip().splitlines()) == 1
    assert "Traceback" not in result.output
    return result.exit_code, result.stderr


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["no_such_module:build"], "cannot be loaded"),
        (["chargtp"], "did you mean 'chargpt'"),
        (["chargpt:depth=3"], "no option 'depth'"),
        (["chargpt", "--methods", "powersdg"], "did you mean 'powersgd'"),
        (["chargpt", "--methods", "acp,acp"], "given twice"),
        (["chargpt", "--methods", "powersgd:rank=0"], "rank"),
        (["chargpt", "--link", "1furlong"], "furlong"),
        (["chargpt", "--workers", "1"], "--workers 1: a race needs at least 2"),
        (["chargpt", "--workers", "3", "--ranks-per-node", "2"], "not a multiple"),
        (["chargpt", "--minutes", "0"], "--minutes 0 must be above 0"),
        (["chargpt", "--minutes", "-3"], "--minutes -3 must be above 0"),
        (["chargpt", "--minutes", "nan"], "--minutes nan must be above 0"),
        (["chargpt", "--seeds", "0"], "--seeds 0 must be at least 1"),
        (["chargpt", "--out", "a_file"], "--out a_file is not a folder that can be written (File exists)"),
        (["chargpt", "--out", "a_file/results"], "--out a_file/results is not a folder that can be written"),
    ],
)
def test_wrong_words_are_one_sentence_and_exit_2(words, says, tmp_path):
    (tmp_path / "a_file").write_text("")
    code, said = refused(*words)
    assert code == 2
    assert says in said


def test_a_folder_that_is_not_writable_is_told_before_the_race():
    code, said = refused("chargpt", "--out", "/proc/results")  # even root may not write there
    assert code == 2
    assert said.startswith("error: --out /proc/results is not a folder that can be written (")


def test_a_loss_that_fails_is_told_before_ranks_start(tmp_path):
    text = "import torch\ndef build():\n    return torch.nn.Linear(2, 2), lambda model, step, rank: missing\n"
    (tmp_path / "racer_that_fails.py").write_text(text)
    code, said = refused("racer_that_fails:build")
    assert code == 2
    assert said.startswith("error: the loss of 'racer_that_fails:build' failed: racer_that_fails.py, line 3: NameError")


@pytest.mark.parametrize("inside", [True, False])
def test_a_model_that_reads_its_own_arguments_gets_none_of_ours(tmp_path, inside):
    """It takes its defaults; one that needs an argument is told of by its place, and not by our exit code alone."""
    read = "parser = argparse.ArgumentParser()\nparser.add_argument('--size', type=int, {})\n"
    read += "size = parser.parse_args().size\n"
    for name, option in (("default", "default=2"), ("needed", "required=True")):
        lines = read.format(option)
        rest = "return torch.nn.Linear(size, 2), lambda model, step, rank: missing\n"
        if inside:
            text = "def build():\n" + "".join(f"    {line}\n" for line in (*lines.splitlines(), rest))
        else:
            text = f"{lines}def build():\n    {rest}"
        (tmp_path / f"racer_{name}_{inside}.py").write_text(f"import argparse, torch\n{text}")
    assert "NameError" in refused(f"racer_default_{inside}:build", "--minutes", "1")[1]
    result = CliRunner().invoke(app, ["race", f"racer_needed_{inside}:build", "--minutes", "1"])
    assert result.exit_code == 2
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: model ")
    assert f"racer_needed_{inside}.py, line " in last
    assert last.endswith("RuntimeError: it called sys.exit(2)")


def test_what_a_model_prints_does_not_mix_with_json(tmp_path):
    text = "import torch\nprint('hello')\ndef build():\n    print('hello')\n    return torch.nn.Linear(2, 2), loss\n"
    text += "def loss(model, step, rank):\n    print('hello')\n    return missing\n"
    (tmp_path / "racer_that_prints.py").write_text(text)
    result = CliRunner().invoke(app, ["race", "racer_that_prints:build", "--json"])
    assert "NameError" in result.stderr
    assert result.stderr.count("hello") == 3
    assert result.stdout == ""


def test_minutes_that_cannot_suffice_are_told_before_ranks_start(monkeypatch):
    monkeypatch.setattr(lab, "available", lambda: "root")
    code, said = refused("mlp:width=64", "--minutes", "0.01", "--link", "100kbit")
    assert code == 1
    assert "timing 7 methods takes " in said
    assert "give --minutes " in said


def test_minutes_that_suffice_for_the_link_but_not_for_training_are_told_before_ranks_start():
    code, said = refused("mlp:width=64", "--minutes", "0.0001")
    assert code == 1
    assert "training two of them " in said


def test_without_links_nothing_can_race_on_one(monkeypatch):
    monkeypatch.setenv("THINWIRE_LAB_MODE", "loopback")
    code, said = refused("chargpt", "--link", "100mbit")
    assert code == 1
    assert "links cannot be emulated here" in said
