import json

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
