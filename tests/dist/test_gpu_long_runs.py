"""Whole runs that share a stack end as those of ranks that train by themselves: the script for a card, on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spawned import run
from thinwire.tools.bench.row_on_rank import RowOnRank
from thinwire.tools.bench.rows import parse_rows
from thinwire.tools.bench.session import BenchSpec

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "long_runs.py"
sys.path.insert(0, str(SCRIPT.parent))

import long_runs  # noqa: E402

pytestmark = pytest.mark.dist
STEPS = 8
SIZE = long_runs.SIZES["tiny"]


def _by_ranks(rank, size, model, rate, rows):
    found = []
    for row in parse_rows(rows):
        doubled = 2 if row.kind == "accumulate" else 1
        spec = BenchSpec(f"{model}:lr={doubled * rate}", (row,), size, steps=STEPS, schedule=True)
        contender = RowOnRank(row, spec, None)
        for _ in range(STEPS):
            contender.step(rank)
        if row.kind == "local":
            contender.sync.finish()
        found.append(contender.workload.held_out_loss())
        contender.close()
    return found


ALL = f"{long_runs.ROWS},{long_runs.ACCUMULATE}"
SOME = "local:sync_every=4:codec=int2:look=0.5,ddp"


@pytest.mark.slow
@pytest.mark.parametrize(
    "compared",
    [
        pytest.param({"adamw": f"{SOME},cast:dtype=int4,accumulate:every=4", "muon": SOME}, id="some rows"),
        pytest.param(dict.fromkeys(long_runs.INNERS, ALL), id="all rows"),
    ],
)
def test_a_stack_trains_as_ranks_do(compared, tmp_path):
    words = [sys.executable, str(SCRIPT), "--out", str(tmp_path), "--size", "tiny", "--steps", str(STEPS)]
    done = subprocess.run([*words, "--device", "cpu"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "gpu_long_runs.json").read_text())
    assert found["left_out"] == []
    every = [row.label for row in parse_rows(ALL)]
    for inner, texts in compared.items():
        rows = {row["name"]: row["loss"] for row in found["rows"] if row["optimizer"] == inner}
        assert list(rows) == every
        wanted = run(_by_ranks, 2, f"{SIZE.model}:optimizer={inner}", SIZE.rates[0], texts)[0]
        assert [rows[row.label] for row in parse_rows(texts)] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("shape", [(3, 8, 24), (3, 24, 8)], ids=str)
def test_muon_of_a_stack_is_torchs(shape):
    gradients = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0))
    stack = torch.nn.Parameter(torch.ones(shape))
    each = [torch.nn.Parameter(x.clone()) for x in stack.detach()]
    ours = long_runs.StackedMuon([stack], 0.1, 0.2)
    torchs = torch.optim.Muon(each, 0.1, 0.2, adjust_lr_fn="match_rms_adamw")
    for step in gradients:
        stack.grad = step.clone()
        for p, g in zip(each, step):
            p.grad = g.clone()
        ours.step()
        torchs.step()
    torch.testing.assert_close(stack.detach(), torch.stack([p.detach() for p in each]), rtol=0.02, atol=0.02)


def test_what_would_not_end_in_time_is_left_out(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["long_runs.py", "--out", str(tmp_path), "--size", "tiny", "--seconds", "0"])
    long_runs.main()
    found = json.loads((tmp_path / "gpu_long_runs.json").read_text())
    assert found["rows"] == []
    assert len(found["left_out"]) == 4
    assert "left out, no time: tiny, adamw" in capsys.readouterr().out
