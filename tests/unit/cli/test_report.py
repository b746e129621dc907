import json
import subprocess
import sys

import pytest

from thinwire.tools.cli.main import app
from verbs import CliRunner

runner = CliRunner()
RANKING = {
    "entries": [{"label": "ssgd", "exact": True, "step_seconds": 0.5, "low_seconds": 0.4, "high_seconds": 0.6}],
    "sentence": "ssgd it is",
}


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ranking.json").write_text(json.dumps(RANKING))
    (tmp_path / "other.json").write_text('{"weather": "fine"}')


@pytest.mark.parametrize("words,name", [([], "report.html"), (["--out", "mine.html"], "mine.html")])
def test_a_page(words, name, tmp_path):
    result = runner.invoke(app, ["report", "ranking.json", *words])
    assert result.exit_code == 0, result.output
    assert f"written: {name}" in result.stdout
    assert "ssgd it is" in (tmp_path / name).read_text()


@pytest.mark.parametrize(
    "words,code,says",
    [
        (["nowhere.json"], 2, "is not a file"),
        (["ranking.json", "--out", "nowhere/report.html"], 2, "folder that exists"),
        (["ranking.json", "--out", "ranking.json"], 2, "one of the files"),
        (["ranking.json", "other.json"], 2, "other.json contains nothing that a report can show"),
    ],
)
def test_what_goes_wrong_is_one_sentence(words, code, says, tmp_path):
    result = runner.invoke(app, ["report", *words])
    assert result.exit_code == code
    assert result.stderr.startswith("error: ")
    assert says in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "report.html").exists()


def test_without_plotly(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.delitem(sys.modules, "plotly.graph_objects", raising=False)
    result = runner.invoke(app, ["report", "ranking.json"])
    assert result.exit_code == 2
    assert "pip install 'thinwire[report]'" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_help_does_not_import_torch():
    code = (
        "import sys; from thinwire.tools.cli.main import app\n"
        "try:\n    app(sys.argv[1:])\nfinally:\n    assert not {'torch', 'plotly'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, "report", "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
