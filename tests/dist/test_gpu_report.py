"""What ``make gpu`` will run on cards, run here: the same script on Gloo and CPUs, and its refusal where no card is."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
FEW = ["unused", "cut, topk", "cast int8", "topk under DDP", "FSDP2's replicas, powersgd", "K-FAC, dkfac", "local"]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(FEW, id="a few"),
        pytest.param(SMALL, marks=pytest.mark.slow, id="every way of the small models"),
    ],
)
def test_ways_of_training(names):
    found = gpu_report.on_ranks(2, "--device", "cpu", "--only", *names, script="ways.py")
    assert found["ended"], found["errors"]
    assert [row for row in found["rows"] if not row["right"]] == []
    assert {row["way"] for row in found["rows"]} == set(names)
    exact = {name for name in names if ways.WAYS[name].exact or ways.WAYS[name].cut}
    assert {row["way"] for row in found["rows"] if row["as_ddp"] is not None} == exact
    assert gpu_report.shown("ways", found["rows"], ("as_ddp", "right")).row_count == len(names)


@pytest.mark.slow
def test_times_of_every_method():
    found = gpu_report.on_ranks(2, "--device", "cpu", "--timed", "16")
    assert found["ended"], found["errors"]
    assert len(found["rows"]) == 1 + len(on_ranks.METHODS)
    assert gpu_report.shown("times", found["rows"], ("step_ms", "MiB")).row_count == len(found["rows"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a card is here: make gpu")
def test_without_a_card_it_says_so():
    done = subprocess.run([sys.executable, GPU / "gpu_report.py"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("make gpu needs a CUDA device")
    assert done.stderr.count("\n") == 1
