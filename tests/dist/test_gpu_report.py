"""What ``make gpu`` will run on cards, run here: the same script on Gloo and CPUs, and its refusal where no card is."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spawned import run

GPU = Path(__file__).parents[1] / "gpu"
sys.path.insert(0, str(GPU))

import gpu_report  # noqa: E402
import on_ranks  # noqa: E402
import ways  # noqa: E402

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["acp", "topk", "qsgd"], marks=pytest.mark.slow),
        pytest.param(sorted({name for name, _ in on_ranks.METHODS}), marks=pytest.mark.slow, id="every method"),
    ],
)
def test_methods_are_right_on_ranks(names):
    found = gpu_report.on_ranks(2, "--device", "cpu", "--only", *names)
    assert found["ended"], found["errors"]
    assert [row["method"] for row in found["rows"]] == [name for name, _ in on_ranks.METHODS if name in names]
    assert [row["method"] for row in found["rows"] if not row["right"]] == []
    assert {row["method"] for row in found["rows"] if row["worst"] is None} == set(on_ranks.DRAWN) & set(names)


SMALL = sorted(name for name, way in ways.WAYS.items() if way.model != "wide")  # the others take a CPU half an hour
FEW = ["FSDP2's sites", "unused", "cut, topk", "topk under DDP", "FSDP2's replicas, powersgd", "K-FAC, dkfac", "local"]


def _ways(rank, size, names):
    return [ways.row(name, ways.WAYS[name], torch.device("cpu")) for name in names]


def check(rows, names):
    assert [row for row in rows if not row["right"]] == []
    assert {row["way"] for row in rows} == set(names)
    exact = {name for name in names if ways.WAYS[name].exact or ways.WAYS[name].cut}
    assert {row["way"] for row in rows if row["as_ddp"] is not None} == exact
    assert gpu_report.shown("ways", rows, ("as_ddp", "right")).row_count == len(names)


@pytest.mark.slow
def test_a_few_ways_of_training():
    check(run(_ways, 2, FEW, fresh=True)[0], FEW)  # DTensor remembers meshes beyond the life of a process group


@pytest.mark.slow
def test_every_way_of_training_the_small_models():
    found = gpu_report.on_ranks(2, "--device", "cpu", "--only", *SMALL, script="ways.py")
    assert found["ended"], found["errors"]
    check(found["rows"], SMALL)


@pytest.mark.slow
def test_times_of_every_method():
    found = gpu_report.on_ranks(2, "--device", "cpu", "--timed", "16")
    assert found["ended"], found["errors"]
    assert len(found["rows"]) == 1 + len(on_ranks.METHODS)
    assert gpu_report.shown("times", found["rows"], ("step_ms", "MiB")).row_count == len(found["rows"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a card is here: make gpu")
def test_without_a_card_it_says_so():
    with pytest.raises(SystemExit, match=r"^make gpu needs a CUDA device[^\n]*$"):
        gpu_report.main()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a card it takes minutes, and writes to the results")
def test_all_measurements_run_small_without_a_card(tmp_path):
    script = GPU.parents[1] / "benchmarks" / "gpu" / "all.py"
    done = subprocess.run(
        [sys.executable, str(script), "--seconds", "300"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "thinwire-out" / "gpu").iterdir()}
    assert {row["name"] for row in found["gpu_kernels"]["rows"]} >= {"torch.topk", "mstopk", "LAMB", "AdamW, fused"}
    assert all(row["ms"] > 0 and row["floor"] > 0 for row in found["gpu_kernels"]["rows"])
    names = [row["name"] for row in found["gpu_exchange"]["rows"]]
    assert names[:2] == ["empty", "DDP"]
    assert names[-1] == "local every 8, 2 bits, 3 late"
    for link in ("gpu_bench", "gpu_bench_10gbit"):
        assert [row["label"] for row in found[link]["rows"]][:2] == ["compute", "ddp"]
    sys.path.insert(0, str(GPU.parents[1] / "docs"))
    recorded = importlib.import_module("recorded")
    for name, data in found.items():
        told = list(recorded.SOURCES[name].read(data))
        assert len(told) > 2, f"docs/recorded.py says nothing of {name}"
    assert {row["name"] for row in found["gpu_long_runs"]["rows"]} >= {"ddp", "alone", "accumulate every=4"}
