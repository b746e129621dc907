"""Every recorded file is read and has its table, and misses are shown."""

import json
import re
from pathlib import Path

import pytest
import recorded

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
PLACE = re.compile(r"^<!-- made: recorded (\w+) -->$", re.MULTILINE)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_of_results_has_claims(path):
    if path.stem in recorded.ELSEWHERE:
        return
    names = [name for name, source in recorded.SOURCES.items() if path in source.files(name)]
    assert len(names) == 1, f"docs/recorded.py does not know {path.name}"
    rows = recorded.rows(names[0])
    assert rows
    assert not [row.what for row in rows if row.what.startswith(recorded.UNREADABLE)]
    assert len({row.what for row in rows}) == len(rows), "two claims of one name"
    assert all((row.met is None) == (row.target == "") for row in rows)
    assert all(row.words for row in rows if " / " in row.what and row.figure[0].isdigit()), "which way?"


def test_every_source_has_its_table_and_can_be_run():
    shown = PLACE.findall((recorded.RESULTS / "figures.md").read_text())
    assert sorted(shown) == sorted(recorded.SOURCES)
    for source in recorded.SOURCES.values():
        program, *words = source.command.split()
        ours = program == "thinwire" or f"\n{words[0]}:" in (ROOT / "Makefile").read_text()
        assert ours or any((ROOT / word).exists() for word in words if word.startswith("benchmarks/"))
        assert (ROOT / "docs" / source.page).is_file()


def test_every_benchmark_is_named():
    page = (recorded.RESULTS / "figures.md").read_text() + "".join(s.command for s in recorded.SOURCES.values())
    for path in (ROOT / "benchmarks").glob("*.py"):
        if "__main__" in path.read_text() and not path.stem.endswith("_contenders"):
            assert path.name in page, f"benchmarks/results/figures.md names {path.name} nowhere"


def test_met_is_what_the_numbers_say():
    assert recorded.claim("a", 1.0, " s", at_most=1.0).met
    assert not recorded.claim("a", 1.01, " s", at_most=1.0).met
    assert recorded.claim("a", 1.01, at_least=1.0) == recorded.Row("a", "1.01", "≥\u00a01", True)
    assert recorded.claim("a", 12345.6).figure == "12,346"


def test_a_ratio_has_its_direction():
    words = {0.0077: "1/130 of it", 0.776: "22\u00a0% less", 0.999: "as much", 1.06: "6\u00a0% more", 5.44: "5.4 times"}
    assert {ratio: recorded.claim("a / b, step", ratio).words for ratio in words} == words
    assert recorded.claim("a, step", 0.776).words == recorded.claim("a / b", 0.776, " s").words == ""


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
        assert (f"* {f['what']}: " in recorded.missed()) is not f["met"]


def test_a_file_of_another_layout_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(recorded, "RESULTS", tmp_path)
    for name, file in {"kfac": "kfac", "gpu_kernels": "gpu_kernels_h200"}.items():
        (tmp_path / f"{file}.json").write_text("{}")
        (row,) = recorded.rows(name)
        assert row.what.startswith(recorded.UNREADABLE)


def test_a_benchmark_without_results_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(recorded, "RESULTS", tmp_path)
    assert recorded.rows("kfac") == []
    assert recorded.table("kfac").endswith("Not recorded.")
    assert recorded.tally() == "0 of 0 figures that have a target reach it."


CARD = {"torch": "2.13.0", "python": "3.11.7", "card": "NVIDIA H200", "driver": "580", "cuda": "13.0", "nccl": "2.28.9"}
KERNEL = {"part": "codecs", "name": "encode 8 bits, residual", "ms": 0.5, "floor": 1.25, "launches": 1}
KERNELS = {**CARD, "copy_bytes_per_second": 4e12, "rows": [{**KERNEL, "elements": n} for n in (65536, 1 << 24)]}
BUSY = {"host": 2.0, "busy": 3.0, "kernels": 40.0, "busy beyond empty": 1.5, "kernels beyond empty": 12.0}
STEPS = {"empty": 1.0, "DDP": 40.0, "int8": 10.0}
EXCHANGE = {**CARD, "ranks": 2, "rows": [{"name": name, "step": step, **BUSY} for name, step in STEPS.items()]}


def test_what_cards_have_run(monkeypatch, tmp_path):
    """Files of the form of benchmarks/gpu, one for each card; the largest size of a kernel counts."""
    monkeypatch.setattr(recorded, "RESULTS", tmp_path)
    assert "No card has run this yet." in recorded.table("gpu_kernels") + recorded.table("gpu_exchange")
    for file, data in {"gpu_kernels": KERNELS, "gpu_kernels_cpu": {**KERNELS, "card": None}}.items():
        (tmp_path / f"{file}.json").write_text(json.dumps(data))
    (tmp_path / "gpu_exchange_h200.json").write_text(json.dumps(EXCHANGE))
    first, second = recorded.rows("gpu_kernels")
    assert first.what == "codecs: encode 8 bits, residual, 16,777,216 elements, NVIDIA H200, torch 2.13.0"
    assert (first.figure, first.words) == ("0.5\u00a0ms, 1 launches", "1.2 times the copy of its bytes")
    assert "a CPU" in second.what
    ddp, int8 = recorded.rows("gpu_exchange")
    assert ddp.figure == "40\u00a0ms; card busy 1.5\u00a0ms in 12 kernels"
    assert (int8.what, int8.words) == ("step of int8, 2 ranks, NVIDIA H200, torch 2.13.0", "75\u00a0% less beside DDP")
