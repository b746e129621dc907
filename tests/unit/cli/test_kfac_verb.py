import json
from pathlib import Path

from thinwire.core.pricing.costs import Costs
from thinwire.systems.kfac import KFACPlan
from verbs import call


def run(*words):
    return call("kfac", *words).stdout


def test_a_plan_is_written_and_priced():
    found = json.loads(run("plan", "resnet50", "--workers", 4, "--out", "plan.json", "--json"))
    assert found["plans"] == sorted(found["plans"], key=lambda p: p["step_seconds"])
    assert {plan["schedule"] for plan in found["plans"]} == {"dkfac", "mpd", "spd", "kaisa:1/2"}
    best = KFACPlan.from_json(Path("plan.json").read_text())
    assert best.schedule == found["plans"][0]["schedule"]
    assert (best.world_size, len(best.layers)) == (4, found["layers"])
    assert found["layers"] == 54


def test_lines_fit_a_terminal():
    text = run("plan", "resnet50", "--explain")
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "calibrate" in text


def test_calibrate_adds_to_measured_costs():
    known = Costs.of_link(1e9, 1e-4, 4)
    Path("costs.json").write_text(known.to_json())
    ran = call("kfac", "calibrate", "--costs", "costs.json", "--largest", 128, "--seconds", 0.5, "--json")
    assert ran.stderr.startswith("... inverting on CPU")
    out = json.loads(ran.stdout)
    assert [d for d, _ in out["seconds"]["inverse"]] == [64, 128]
    costs = Costs.from_json(Path("costs.json").read_text())
    assert costs.exchanges == known.exchanges
    for kind in ("inverse", "eigen"):
        assert costs.compute[kind].provenance == "measured here"
        measured = [seconds for _, seconds in out["seconds"][kind]]  # the curve never falls, whatever the noise
        for d in (64, 128):
            assert 0.999 * min(measured) <= costs.compute_seconds(kind, d) <= 8 * max(measured)
    text = run("plan", "vgg16", "--costs", "costs.json", "--schedules", "spd, dp", "--method", "eigen")
    assert "dp" in text
