"""A race on real ranks: steps are timed on a thin link, losses trained beside it; then again, from what is known."""

import json

import pytest

from thinwire.core.methods.acp import ACP
from thinwire.core.methods.powersgd import PowerSGD
from thinwire.predict.choose.worth import read_worth
from thinwire.tools.bench import race_losses
from thinwire.tools.report.inputs import Bench, read_files
from verbs import call

pytestmark = pytest.mark.net
MODEL = """
import torch

def build(width=256):
    model = torch.nn.Sequential(
        torch.nn.Linear(32, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU(),
        torch.nn.Linear(width, 8),
    )
    right = torch.randn(32, 8, generator=torch.Generator().manual_seed(7))

    def loss(model, step, rank):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1000 * step + rank))
        return torch.nn.functional.cross_entropy(model(x), (x @ right).argmax(1))

    return model, loss
"""
WORDS = ("race", "small_racer:build", "--link", "20mbit", "--minutes", "20", "--seeds", "1", "--json")


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "small_racer.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(race_losses, "MOST", 100)  # too few to search for rates, each of which is a session of ranks
    return tmp_path


def race(*words):
    result = call(*WORDS, *words)
    return json.loads(result.stdout), result.stderr


@pytest.mark.slow
def test_what_sends_little_is_first_on_a_thin_link(any_mode, here):
    pytest.importorskip("matplotlib")
    data, said = race("--methods", "ssgd,powersgd:rank=4")
    rows = {row["label"]: row for row in data["race"]["rows"]}
    assert data["race"]["winner"] == "powersgd rank=4"
    assert next(iter(rows)) == "powersgd rank=4"
    assert rows["powersgd rank=4"]["sooner"] > 1.1
    assert rows["ddp"]["sooner"] == 1.0
    assert rows["ssgd"]["steps"] == 1.0  # and never trained
    assert data["race"]["next"] == 'sync = tw.attach(model, optimizer, "powersgd", rank=4)'
    assert len(data["race"]["sentences"]) == 3
    assert "not sure yet: one seed may be luck" in data["race"]["sentences"][2]
    assert "... seconds per step on 20mbit" in said
    assert "... losses of ddp, powersgd rank=4: 100 steps, seed 0" in " ".join(said.split())

    file = here / "thinwire-out" / "race.json"
    assert json.loads(file.read_text()) == data
    assert data["load"]["cores"] >= 1
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    worth = read_worth(file)
    assert worth(PowerSGD(rank=4), 100_000, 2).middle == max(1.0, rows["powersgd rank=4"]["steps"])
    assert not worth(ACP(rank=4), 100_000, 2).known
    (bench,) = read_files([file]).of(Bench)
    assert bench.curves.keys() == {"ddp", "ssgd", "powersgd rank=4"}
    assert all(p.validation is None for curve in bench.curves.values() for p in curve)

    again, said = race("--methods", "ssgd,powersgd:rank=4")
    assert {**again, "load": data["load"]} == data
    assert "all 5 runs were known from an earlier race, and none was trained again" in " ".join(said.split())
    assert "seconds per step: as measured here on" in said
    assert "..." not in said  # nothing is learnt


@pytest.mark.slow
def test_minutes_that_are_over_leave_the_times_of_steps(here, monkeypatch):
    monkeypatch.setattr(race_losses, "MOST", 50)  # however fast this machine is
    data, said = race("--methods", "powersgd:rank=4")
    assert data["race"]["winner"] is None
    assert data["race"]["next"].startswith("the same command with --minutes ")
    assert {row["label"] for row in data["race"]["rows"] if row["step_seconds"] > 0} == {"ddp", "powersgd rank=4"}
    assert "step times only" in said
    assert "has the shortest step: " in " ".join(said.split())
    assert json.loads((here / "thinwire-out" / "race.json").read_text()) == data
    assert not (here / "thinwire-out" / "race.png").exists()


@pytest.mark.slow  # three sessions of ranks
def test_a_row_that_fails_is_told_and_the_others_go_on(here):
    (here / "fails_later.py").write_text("def row(workload, group):\n    raise ArithmeticError('as planned')\n")
    data, said = race("--methods", "fails_later:row,powersgd:rank=4")
    rows = {row["label"]: row for row in data["race"]["rows"]}
    assert "as planned" in rows["fails_later:row"]["note"]
    assert rows["fails_later:row"]["seconds"] is None
    assert data["race"]["winner"] == "powersgd rank=4"
    assert "fails_later:row: failed: rank 0: ArithmeticError: as planned" in " ".join(said.split())
