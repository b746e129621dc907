"""The page of the comparison says what its results file says."""

import copy
import importlib
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "benchmarks" / "peers"
NAMES = ("store", "catalogue", "page", "recorded", "race", "tolls")


@pytest.fixture(scope="module")
def peers():
    """The modules of the project beside and of the pages, which are none of the package."""
    folders = [str(FOLDER), str(ROOT / "docs"), str(ROOT / "benchmarks")]
    sys.path[:0] = folders
    try:
        yield {name: importlib.import_module(name) for name in NAMES}
    finally:
        for folder in folders:
            sys.path.remove(folder)
        for name in NAMES:
            sys.modules.pop(name, None)


def test_tables_are_those_of_the_results(peers):
    page, results = peers["page"], peers["store"].read()
    text = (ROOT / "docs" / "peers.md").read_text()
    assert results["runs"]
    assert page.tables(results) == page.TABLES.read_text(), "run: make -C benchmarks/peers page"
    assert "images/peers_times.png" in text
    assert (page.PICTURES / "peers_times.png").stat().st_size > 10_000


def test_results_are_of_the_catalogue_and_ratios_of_their_run(peers):
    catalogue, results = peers["catalogue"], peers["store"].read()
    assert results["settings"] == {name: catalogue.SIZES[name].setting for name in results["settings"]}
    assert set(results["tried"]) == set(catalogue.TRIED)
    for run in results["runs"]:
        rows = {row["label"]: row for row in run["rows"]}
        assert {row.label for row in catalogue.SIZES[run["size"]].groups[run["group"]].rows} <= set(rows)
        for row in rows.values():
            if row["step_ratio"]:
                assert row["step_ratio"] == pytest.approx(row["step_seconds"] / rows["ddp"]["step_seconds"])
            if row["target_ratio"]:
                assert row["target_ratio"] == pytest.approx(row["target_seconds"] / rows["ddp"]["target_seconds"])
                assert row["last_loss"] <= catalogue.SIZES[run["size"]].target


def test_a_loss_of_ours_and_a_failure_are_shown(peers):
    page, results = peers["page"], copy.deepcopy(peers["store"].read())
    run = results["runs"][0]
    results["runs"] = [run]
    for row in run["rows"]:
        row["target_ratio"] = 2.0 if page.title(row).startswith("thinwire") else row["target_ratio"] and 0.5
    run["rows"][-1]["error"] = "rank 1: RuntimeError: gone"
    assert "(0.50) |" in page.winners(results)
    assert "(2.00)" in page.winners(results).splitlines()[-1].split("|")[-2]
    assert "failed: rank 1: RuntimeError: gone" in page.details(results)


@pytest.mark.parametrize("times, who", [(0.01, "Accelerate|torchft|DDP"), (100.0, "thinwire")])
def test_the_verdict_is_the_faster_ones_whoever_that_is(peers, times, who, monkeypatch, tmp_path):
    """Steps of all other libraries a hundred times as fast or as slow: the ranges over seeds do not overlap."""
    page, found = peers["page"], json.loads(peers["page"].TOLLS_FILE.read_text())
    for network in found["clocked"]:
        for label, pace in network["paces"].items():
            if not label.startswith(peers["recorded"].OURS):
                pace.update({key: times * value for key, value in pace.items() if isinstance(value, float)})
    (tmp_path / "tolls.json").write_text(json.dumps(found))
    monkeypatch.setattr(page, "TOLLS_FILE", tmp_path / "tolls.json")
    assert page.verdicts()
    for one in page.verdicts():
        assert re.fullmatch(rf"({who}).*: (9\d|100) %", one.words), one
        assert f"| {one.words} |" in page.summary()


def test_a_verdict_says_when_ranges_overlap_and_when_nothing_is_between(peers):
    page = peers["page"]
    ours = page.Best("thinwire a", (0.9, 1.0, 1.2))
    words = {
        (other): page.Verdict("", ours, page.Best("b", other), None).words
        for other in ((1.1, 1.25, 1.3), (1.3, 1.6, 2.0), (0.5, 0.6, 0.8), (0.9, 1.005, 1.1))
    }
    assert list(words.values()) == [
        "thinwire: 20 %, within the spread of seeds",
        "thinwire: 38 %",
        "b: 40 %",
        "equal",
    ]


def test_the_pages_sentences_are_those_of_its_table(peers):
    found = {one.where: one for one in peers["page"].verdicts()}
    assert len(found) == len(peers["tolls"].read()["clocked"])
    over = {w: one.local / min(one.ours.times[1], one.other.times[1]) for w, one in found.items() if one.local}
    apart = [over.pop(where) for where in ("1.1M, 2 workers, 10 Mb/s", "10M, 2 workers, 1 Gb/s")]
    assert [round(100 * (one - 1)) for one in apart] == [25, 24]
    assert round(100 * (max(over.values()) - 1)) == 7
    four = found["1.1M, 4 workers, 100 Mb/s"]
    assert four.alone > four.local
    assert f"| {four.where} | {four.alone / four.local:.2f} | {four.local:.2f} | " in peers["page"].summary()
    times = [found[f"{size} workers, 100 Mb/s"].ours.times[1] for size in ("0.4M, 8", "1.1M, 2", "3.3M, 2", "10M, 2")]
    assert [round(time, 1) for time in times] == [1.5, 1.1, 1.1, 1.4]


def test_tolls_are_steps_times_seconds_over_those_of_no_network(peers):
    catalogue, page = peers["catalogue"], peers["page"]
    found = json.loads(page.TOLLS_FILE.read_text())
    trained = {one["name"]: one for one in found["trained"]}
    assert list(trained) == list(catalogue.TOLLS)
    for name, one in trained.items():
        asked = catalogue.TOLLS[name]
        every = catalogue.Tolls("", 2, 1, (), more=asked.more)
        assert len(asked.trained) == len(every.trained) - len(asked.left_out)  # labels that are left out are rows
        assert {label for labels in asked.not_timed.values() for label in labels} <= {row.label for row in asked.rows}
        assert list(one["rows"]) == [row.label for row in asked.trained]
        assert one["rows"]["ddp"]["factors"] == pytest.approx([1.0] * len(one["rows"]["ddp"]["factors"]))
        for label, row in one["rows"].items():
            assert row == one["rows"][catalogue.trained_as(label)]
        for row in asked.trained:  # docs/recorded.py, which reads no code, tells thinwire's rows by their labels
            mine = page.title({"label": row.label, "kind": row.kind}).startswith("thinwire")
            assert row.label.startswith(peers["recorded"].OURS) == mine
    shown = page.tolls({})
    assert found["clocked"]
    assert all(peers["tolls"].is_whole(kind, one) for kind in found for one in found[kind])  # nothing to measure
    for network in found["clocked"]:
        one = trained[network["name"]]
        for chosen in network["chosen"].values():
            assert chosen == peers["tolls"].chosen_steps(chosen["plan"], network["name"])
        assert list(network["paces"]) == [r.label for r in catalogue.TOLLS[network["name"]].timed(network["link"])]
        for label, pace in network["paces"].items():
            factors = (one["rows"] | network["chosen"])[label]["factors"]
            steps = one["steps"] * sorted(float("inf") if f is None else f for f in factors)[len(factors) // 2]
            seconds = pace["start_seconds"] + steps * pace["seconds"]
            toll = seconds / (one["steps"] * network["compute_seconds"])
            assert toll == float("inf") or f"{toll:.2f}" in shown
