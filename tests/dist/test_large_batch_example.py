"""examples/large_batch runs from one command, and what it prints is true where truth can be known."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "large_batch"

pytestmark = pytest.mark.dist


def run(*arguments, script=EXAMPLE / "run.py"):
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        capture_output=True, text=True, timeout=250, env=environment, cwd=ROOT,
    )  # fmt: skip


@pytest.mark.slow
def test_quick(tmp_path):
    for name in ("sklearn", "PIL", "safetensors", "matplotlib"):
        pytest.importorskip(name)
    done = run("--quick", "--json", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ranks"] == 2
    rows = {(row["recipe"], row["batch"]): row for row in found["batches"]}
    assert list(rows) == [
        *(("SGD, linearly scaled", batch) for batch in (128, 1024, 8192)),
        ("SGD, tuned", 8192), ("LARS", 1024), ("LARS", 8192), ("LAMB", 8192),
    ]  # fmt: skip
    weights = 9 * 16 + 16 + 16 * 9 * 32 + 32 + 512 * 64 + 64 + 640 + 10
    for (_, batch), row in rows.items():
        assert row["steps"] == len(row["accuracy"]) * (2 * 9 * 1437 // batch)
        assert row["bytes_sent"] == row["steps"] * 4 * weights  # a ring of two: as many bytes as the gradient has
    scaled = [rows["SGD, linearly scaled", batch] for batch in (128, 1024, 8192)]
    assert scaled[0]["accuracy"][-1] > 0.9
    assert [row["lr"] / scaled[0]["lr"] for row in scaled] == [1, 8, 64]
    assert [panel["x"] for panel in found["picture"]["panels"][:2]] == ["samples per step", "seconds"]

    fixed, growing, cached = found["resolutions"]
    assert [e["size"] for e in fixed["epochs"]] == [24, 24]
    assert [e["size"] for e in growing["epochs"]] == [12, 24]
    assert growing["bytes_sent"] * 2 == growing["dense_bytes"]  # bf16
    # The same samples, augmented alike: the cache changes no bit of the training.
    assert [e["accuracy"] for e in cached["epochs"]] == [e["accuracy"] for e in growing["epochs"]]
    first, second = cached["epochs"]
    assert (first["samples"], first["hits"], first["cached_share"]) == (192, 0, 1.0)
    assert (second["samples"], second["hits"]) == (192, 192)  # the new size finds what the old one decoded

    (split,) = found["stalls"]
    rows = split["rows"]
    assert list(rows) == ["files", "half cached", "cached", "synthetic"]
    assert 0.3 < rows["half cached"]["cached_share"] < 0.7
    for name in ("half cached", "cached"):
        row = rows[name]
        assert row["samples"] == 192
        assert row["hits"] == round(row["cached_share"] * 192)
        assert row["lru_hit_rate"] <= row["cached_share"]
    assert rows["cached"]["cached_share"] == 1.0
    assert (tmp_path / "large_batch.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "arena").exists()


@pytest.mark.parametrize(
    "arguments, words", [(["--parts", "batch"], "choose from batches"), (["--seeds", "0"], "--seeds")]
)
def test_bad_arguments_get_a_sentence(arguments, words):
    done = run(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
