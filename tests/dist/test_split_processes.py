"""The verbs in two processes over TLS, against both ends in one process: bit for bit."""

import contextlib
import json
import multiprocessing
import sys

import pytest
import torch

from spawned import free_port
from thinwire.systems.link.keys import new_keys
from thinwire.systems.split import LocalPair, Recipe, SplitPlan, load_half, prepare
from thinwire.systems.split.finetune import train
from thinwire.systems.split.models import preset
from thinwire.systems.split.surgery import read_facts
from thinwire.systems.split.tasks import stdlib_task
from thinwire.tools.cli import main

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


def verb(role, folder, port, *more):
    """What a process of this role does; its standard output is in a file."""
    options = {"keys": folder / "keys" / role, "checkpoint-dir": folder / f"{role}-kept", "out": folder / f"{role}.out"}
    options["listen" if role == "cloud" else "cloud"] = f"127.0.0.1:{port}"
    sys.argv = ["thinwire", "split", role, str(folder), "--json", *(f"--{name}={x}" for name, x in options.items())]
    sys.argv += more
    with open(folder / f"{role}.json", "w") as file, contextlib.redirect_stdout(file):
        main.run()


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
    fork = multiprocessing.get_context("fork")
    processes = [
        fork.Process(target=verb, args=(role, tmp_path, port, *more), daemon=True)
        for role, *more in (("cloud",), ("edge", "--checkpoint-every", str(report.steps)))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
        assert process.exitcode == 0
    of_cloud, of_edge = (json.loads((tmp_path / f"{role}.json").read_text()) for role in ("cloud", "edge"))
    assert of_edge["losses"] == report.losses
    assert of_edge["score"] == report.score
    assert of_cloud["steps"] == report.steps
    assert read_facts(tmp_path / "edge.out")["pair"] == read_facts(tmp_path / "cloud.out")["pair"]
    same_as(pair, tmp_path)
