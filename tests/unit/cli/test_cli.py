import json
import subprocess
import sys

import pytest

from thinwire.cli.main import app
from verbs import CliRunner

runner = CliRunner()


@pytest.mark.parametrize(
    "words,says",
    [
        (["--model", "chargtp"], "did you mean 'chargpt'"),
        (["--methods", "ssdg"], "did you mean 'ssgd'"),
        (["--methods", "acp:rank=-1"], "rank"),
        (["--link", "1furlong"], "furlong"),
        (["--workers", "0"], "at least 1"),
        (["--steps", "0"], "at least 1"),
        (["--plot", "a.gif"], ".png or .html"),
    ],
)
def test_wrong_words_of_bench_are_one_sentence_and_exit_2(words, says):
    result = runner.invoke(app, ["bench", *words])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert says in result.stderr
    assert "Traceback" not in result.output
    assert len(result.stderr.strip().splitlines()) == 1


def test_wrong_steps_of_the_demo():
    assert runner.invoke(app, ["demo", "--steps", "0"]).exit_code == 2


def test_control_c_is_130(monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("thinwire.lab.Cluster.parse", interrupted)
    assert runner.invoke(app, ["bench"]).exit_code == 130


def test_doctor():
    result = runner.invoke(app, ["doctor", "--json"])
    found = json.loads(result.stdout)
    assert result.exit_code == 0
    assert "gloo" in found["backends"]
    assert {"torch", "cores", "lab", "interface", "gpus", "extras"} <= set(found)
    assert runner.invoke(app, ["doctor"]).exit_code == 0


def test_help_and_version_do_not_import_torch():
    code = (
        "import sys; from thinwire.cli.main import app\n"
        "try:\n    app(sys.argv[1:])\nfinally:\n    assert 'torch' not in sys.modules"
    )
    for words in (["--help"], ["bench", "--help"], ["demo", "--help"], ["--version"]):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
