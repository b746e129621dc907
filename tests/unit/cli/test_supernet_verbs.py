import json

import pytest
import torch

from verbs import call


def said(*words, **options):
    return call("supernet", *words, **options)


SMALL = ("--size", "24x48", "--max-disparity", "9")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # of torch 2.9's own reader
def test_train_table_search_export_one_after_the_other(tmp_path):
    trained = said("train", "--out", "run", "--steps", "2,2", "--batch-size", "2", *SMALL, "--json")
    result = json.loads(trained.stdout)
    assert [p["done"] for p in result["phases"]] == [2, 2]
    assert set(result["corners"]) == {"largest", "shallow", "smallest"}
    assert result["constant_guess_epe"] > 0
    more = said("train", "--out", "more", "--steps", "2,2", "--batch-size", "2", *SMALL)
    assert "next: thinwire supernet search more/net.pt" in " ".join(more.stdout.split())
    gone_on = said("train", "--out", "more", "--steps", "2,2", "--batch-size", "2", *SMALL)
    assert "all 4 steps had been done before" in gone_on.stdout
    again = json.loads(said("train", "--out", "run", "--steps", "2,2", "--batch-size", "2", *SMALL, "--json").stdout)
    assert [p["done"] for p in again["phases"]] == [0, 0]
    assert again["corners"] == result["corners"]
    words = said("table", "run/net.pt", "--size", "24x48", "--repeats", "1", "--out", "table.json").stdout
    assert words.startswith("smallest network")
    search = ("search", "run/net.pt", "--population", "4", "--generations", "1", "--table", "table.json", *SMALL)
    found = json.loads(said(*search, "--repeats", "1", "--limit-ms", "10000", "--json").stdout)
    assert found["measured_ms"] <= 10000
    assert [series["name"] for series in found["picture"]["panels"][0]["lines"]][1] == "best at this latency"
    half = said(*search, "--repeats", "1")  # a limit of its own
    assert "sub-networks to evaluate" in half.stderr
    measured = json.loads((tmp_path / "run" / "best.json").read_text())
    assert 0 < measured["measured_ms"] <= measured["limit_ms"]
    assert measured["load"]["cores"] >= 1
    assert (tmp_path / "run" / "pareto.png").stat().st_size > 1000
    assert "the smallest takes" in said(*search, "--limit-ms", "0.001", code=2).stderr
    assert "is for images of 24x48" in said(*search, "--size", "48x96", code=2).stderr
    export = ("export", "run/calibrated.pt", "--sub-net", "run/best.json", "--size", "24x48")
    ran = said(*export, "--out", "best.pt2", "--json")
    assert ran.stderr.splitlines()[0] == "... writing best.pt2"
    exported = json.loads(ran.stdout)
    assert exported["max_difference_px"] < 1e-3
    assert exported["parameters"] == measured["parameters"]
    assert torch.export.load("best.pt2") is not None
