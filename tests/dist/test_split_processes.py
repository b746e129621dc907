"""Two processes over TLS, by the command line, against both ends in one process: bit for bit."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from spawned import free_port
from thinwire.systems.link.keys import new_keys
from thinwire.systems.split import LocalPair, Recipe, SplitPlan, load_half, prepare
from thinwire.systems.split.finetune import train
from thinwire.systems.split.models import preset
from thinwire.systems.split.surgery import read_facts
from thinwire.systems.split.tasks import stdlib_task

CODE = "import torch; torch.set_num_threads(1); from thinwire.tools.cli.main import run; run()"
CLI = [sys.executable, "-c", CODE, "split"]
WORDS = {"name": "stdlib", "model": "none", "pretrained": False, "length": 12, "lines": 50, "seed": 0}
PLANS = [
    SplitPlan(1, rank=4),
    SplitPlan(1, rank=4, up=("delta:4", "pack"), down=("int8", "pack"), labels="cloud"),
    SplitPlan(1, rank=4, up=("int8", "pack"), down=("delta:4", "pack"), front_on="cloud"),
]


def prepared(folder, plan, epochs=2):
    """Halves, keys, and what both ends must come to, from the same files in this process: 23 steps an epoch."""
    task = stdlib_task(WORDS["lines"], WORDS["length"])
    recipe = Recipe(learning_rate=1e-3, epochs=epochs, batch_size=16)
    sizes = {"layers": 2, "hidden": 32, "heads": 2}
    model = preset("bert", classes=task.classes, vocabulary=task.vocabulary, length=12, **sizes)
    prepare(model, plan, folder, notes={"task": WORDS, "recipe": json.loads(recipe.to_json())})
    new_keys(folder / "keys", ["cloud", "edge"])
    ends = [load_half(folder, role).module for role in ("edge", "cloud")]
    front, back = ends if plan.front_on == "edge" else reversed(ends)
    pair = LocalPair(front, back, recipe, recipe.steps(len(task.train)), folder / "local")
    report = train(pair, task, pair.ledger, 0, None)
    pair.checkpoint()
    return report, pair


def start(role, folder, port, *more):
    options = {"keys": folder / "keys" / role, "checkpoint-dir": folder / f"{role}-kept", "out": folder / f"{role}.out"}
    options["listen" if role == "cloud" else "cloud"] = f"127.0.0.1:{port}"
    words = [role, str(folder), "--json", *(f"--{name}={value}" for name, value in options.items())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*CLI, *words, *more], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(*processes):
    """The JSON of each."""
    found = []
    try:
        for process in processes:
            out, errors = process.communicate(timeout=250)
            assert process.returncode == 0, errors
            found.append(json.loads(out))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return found


def same_as(pair, folder):
    """Trained parameters and optimizer states of both ends, bit for bit."""

    def newest(kept):
        return torch.load(sorted(kept.iterdir())[-1] / "state.pt", weights_only=True)["optimizer"]["state"]

    for role, half in (("edge", pair.half), ("cloud", pair.cloud.half)):
        (folder / f"{role}.out").rename(folder / f"{role}.safetensors")
        found = load_half(folder, role).module.state_dict()
        assert all(torch.equal(tensor, found[name]) for name, tensor in half.state_dict().items()), role
        state, expected = newest(folder / f"{role}-kept"), newest(folder / "local" / role)
        assert state.keys() == expected.keys()
        for key in state:
            assert all(torch.equal(state[key][name], expected[key][name]) for name in expected[key])


@pytest.mark.parametrize(
    "plan",
    [PLANS[0], *(pytest.param(plan, marks=pytest.mark.slow) for plan in PLANS[1:])],
    ids=["plain", "coded", "front in the cloud"],
)
def test_two_processes_are_one(plan, tmp_path):
    report, pair = prepared(tmp_path, plan, epochs=1)
    assert report.steps >= 20
    port = free_port()
    cloud = start("cloud", tmp_path, port)
    edge = start("edge", tmp_path, port, "--checkpoint-every", str(report.steps))
    of_edge, of_cloud = finish(edge, cloud)
    assert of_edge["losses"] == report.losses
    assert of_edge["score"] == report.score
    assert of_cloud["steps"] == report.steps
    assert read_facts(tmp_path / "edge.out")["pair"] == read_facts(tmp_path / "cloud.out")["pair"]
    same_as(pair, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["edge", "cloud"])
def test_a_killed_process_goes_on_from_its_checkpoint(victim, tmp_path):
    report, pair = prepared(tmp_path, PLANS[1])
    port = free_port()
    ends = {"cloud": start("cloud", tmp_path, port), "edge": start("edge", tmp_path, port, "--checkpoint-every", "2")}
    kept = tmp_path / "edge-kept"
    deadline = time.monotonic() + 90
    while len([p for p in kept.iterdir() if p.name.startswith("step-")] if kept.is_dir() else []) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ends[victim].send_signal(signal.SIGKILL)
    ends[victim].wait()
    if victim == "cloud":  # the edge says so and ends; both are started again
        ends["cloud"] = start("cloud", tmp_path, port)
        _, errors = ends["edge"].communicate(timeout=250)
        assert ends["edge"].returncode == 1
        assert "error: " in errors
    ends["edge"] = start("edge", tmp_path, port, "--checkpoint-every", str(report.steps))
    of_edge, _ = finish(ends["edge"], ends["cloud"])
    assert 0 < of_edge["steps"] < report.steps
    assert of_edge["losses"] == report.losses[-of_edge["steps"] :]
    same_as(pair, tmp_path)
