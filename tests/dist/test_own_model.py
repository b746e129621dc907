"""The recipe of the bench's page, a model with a DataLoader, on real ranks and in every verb that measures a model."""

import contextlib
import json
import sys
from pathlib import Path

import pytest

from fences import blocks
from spawned import run
from thinwire.tools.bench import worker
from thinwire.tools.bench.models.registry import build_model
from thinwire.tools.bench.rows import parse_rows
from thinwire.tools.bench.session import BenchSpec
from verbs import call

pytestmark = pytest.mark.dist
MODEL = "recipe_of_the_page:build"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs/commands.md").read_text()
    recipe = next(block.code for block in blocks(page) if "def build()" in block.code)
    (tmp_path / "recipe_of_the_page.py").write_text(recipe)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _trained(rank, size, folder):
    sys.path.insert(0, str(folder))
    with contextlib.redirect_stdout(sys.stderr):
        rows = parse_rows("ddp,ssgd,local:sync_every=4")
        record = worker.run(BenchSpec(MODEL, rows, size, steps=120, rounds=1, warmup=0, every=40, curves=True))
    workload = build_model(MODEL)
    first = [workload.loss(workload.model, step, rank).item() for step in (0, 1, 0)]
    sys.path.remove(str(folder))
    return [(row.error, [p.validation for p in row.curve], row.losses) for row in record.rows[1:]], first


def test_it_trains_on_ranks_that_see_their_own_data(folder):
    (rows, mine), (_, others) = run(_trained, 2, folder)
    (_, ddp, losses), (_, _, same), (_, local, _) = rows
    assert [error for error, _, _ in rows] == ["", "", ""]
    assert ddp[-1] < 0.7 * ddp[0]
    assert local[-1] < 0.8 * local[0]
    assert same[: len(losses)] == pytest.approx(losses, rel=1e-3)
    assert losses[0] == pytest.approx((mine[0] + others[0]) / 2)
    assert mine[0] == mine[2]
    assert len({*mine, *others}) == 4


def test_plan_and_profile_take_it(folder):
    call("profile", MODEL, "--workers", 1, "--out", "profile.json")
    assert len(json.loads(Path("profile.json").read_text())["tensors"]) == 4
    assert json.loads(call("plan", MODEL, "--link", "1gbit", "--json").stdout)
    assert "1.35e-06 billion parameters" in " ".join(call("plan", MODEL, "--memory").output.split())
