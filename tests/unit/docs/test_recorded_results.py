"""The page of results: every recorded file is read, every figure that a page names is there, misses are shown."""

import json
import re
from pathlib import Path

import pytest
import recorded

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
DIRECTIVE = re.compile(r"^```\{recorded\} (\w+)$", re.MULTILINE)
ROLE = re.compile(r"\{recorded\}`([^`]+)`")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_of_results_has_claims(path):
    assert path.stem in recorded.SOURCES, f"docs/recorded.py does not know {path.name}"
    rows = recorded.rows(path.stem)
    assert rows
    assert not [row.what for row in rows if row.what.startswith(recorded.UNREADABLE)]
    assert len({row.what for row in rows}) == len(rows), "two claims of one name"
    assert all((row.met is None) == (row.target == "") for row in rows)


def test_every_source_is_on_the_page_and_can_be_run():
    shown = DIRECTIVE.findall((ROOT / "docs" / "results.md").read_text())
    assert sorted(shown) == sorted([*recorded.SOURCES, "tally"])
    for source in recorded.SOURCES.values():
        program, *words = source.command.split()
        ours = program == "thinwire" or f"\n{words[0]}:" in (ROOT / "Makefile").read_text()
        assert ours or any((ROOT / word).exists() for word in words if word.startswith("benchmarks/"))
        assert (ROOT / "docs" / source.page).is_file()


def test_every_benchmark_is_named():
    page = (ROOT / "docs" / "results.md").read_text() + "".join(s.command for s in recorded.SOURCES.values())
    for path in (ROOT / "benchmarks").glob("*.py"):
        if "__main__" in path.read_text() and not path.stem.endswith("_contenders"):
            assert path.name in page, f"docs/results.md names {path.name} nowhere"


def test_figures_in_the_text_are_recorded():
    named = [text for page in (ROOT / "docs").rglob("*.md") for text in ROLE.findall(page.read_text())]
    assert len(named) >= 3
    for text in named:
        assert recorded.figure(text)
    with pytest.raises(ValueError, match="no recorded figure"):
        recorded.figure("kfac: no such claim")


def test_met_is_what_the_numbers_say():
    assert recorded.claim("a", 1.0, " s", at_most=1.0).met
    assert not recorded.claim("a", 1.01, " s", at_most=1.0).met
    assert recorded.claim("a", 1.01, at_least=1.0) == recorded.Row("a", "1.01", "≥\u00a01", True)
    assert recorded.claim("a", 12345.6).figure == "12,346"


def test_a_miss_of_the_main_figures_stays_in_the_table():
    data = json.loads((ROOT / "benchmarks" / "results" / "main_figures.json").read_text())
    rows = {row.what: row for row in recorded.rows("main_figures")}
    assert len(rows) == len(data["figures"])
    for f in data["figures"]:
        row = rows[f["what"]]
        assert float(row.figure.split()[0]) == pytest.approx(f["value"], rel=6e-3)
        if f["target"] is None:
            assert row.met is None
            continue
        assert row.met is f["met"]
        reached = f["value"] <= f["target"] if row.target.startswith("≤") else f["value"] >= f["target"]
        assert reached is f["met"]
        line = next(line for line in recorded.table("main_figures").splitlines() if f"| {f['what']} |" in line)
        assert ("**no**" in line) is not f["met"]


def test_a_file_of_another_layout_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(recorded, "RESULTS", tmp_path)
    (tmp_path / "kfac.json").write_text("{}")
    (row,) = recorded.rows("kfac")
    assert row.what.startswith(recorded.UNREADABLE)


def test_a_benchmark_without_results_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(recorded, "RESULTS", tmp_path)
    assert recorded.rows("kfac") == []
    assert recorded.table("kfac").endswith("Not recorded.\n")
    assert recorded.tally() == "0 of 0 figures that have a target reach it."
