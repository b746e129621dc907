"""What newcomers start first: the trackers' example, and two containers as two machines."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

pytestmark = pytest.mark.dist


def _tracked(folder, *words, before=""):
    code = f"import runpy, sys\n{before}\nsys.argv = ['train.py', *{words!r}]\n"
    code += f"runpy.run_path({str(EXAMPLES / 'trackers' / 'train.py')!r}, run_name='__main__')"
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)


FAKE = """
import json, types
kept = []
def end():
    open("kept.json", "w").write(json.dumps(kept))
def init(project, mode, dir):
    assert mode == "offline"
    return types.SimpleNamespace(log=lambda figures, step: kept.append([step, figures]), finish=end)
sys.modules["wandb"] = types.SimpleNamespace(init=init)
sys.modules["mlflow"] = types.SimpleNamespace(
    set_tracking_uri=lambda uri: None, start_run=lambda: None, end_run=end,
    log_metrics=lambda figures, step: kept.append([step, figures]),
)
"""


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_gets_the_figures_of_every_step(tmp_path, name):
    done = _tracked(tmp_path, name, before=FAKE)
    assert done.returncode == 0, done.stderr
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert [step for step, _ in kept] == list(range(1, 51))
    assert kept[-1][1]["loss"] < kept[0][1]["loss"]
    assert "thinwire/bytes_sent" in kept[0][1]


@pytest.mark.parametrize(
    ("words", "says"), [(["wandb"], "wandb is not installed: pip install wandb"), (["board"], "give wandb or mlflow")]
)
def test_a_tracker_that_is_not_there_is_one_sentence(tmp_path, words, says):
    done = _tracked(tmp_path, *words, before="sys.modules['wandb'] = None")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [line for line in done.stderr.splitlines() if says in line] != []


def test_the_containers_commands_and_files_are_real(tmp_path):
    yaml = pytest.importorskip("yaml")
    folder = EXAMPLES / "two_machines"
    nodes = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    ranks = []
    for name, node in nodes.items():
        program, *words = shlex.split(node["command"])
        asked = get_args_parser().parse_args(words)
        ranks.append(asked.node_rank)
        assert (program, asked.nnodes, asked.master_addr) == ("torchrun", str(len(nodes)), "node0"), name
        assert (asked.training_script, asked.training_script_args) == ("train.py", ["local"])
        assert (folder / node["build"]["context"] / node["build"]["dockerfile"]).samefile(folder / "Dockerfile")
    assert ranks == [0, 1]
    copied = [line.split()[1:] for line in (folder / "Dockerfile").read_text().splitlines() if line.startswith("COPY")]
    sent = (folder / "Dockerfile.dockerignore").read_text().splitlines()
    for *sources, _ in copied:
        assert all((ROOT / source).exists() and f"!{source}" in sent for source in sources)
    assert copied[-1] == ["examples/launchers/train.py", "/train/train.py"]
    # the entry shapes the link, then becomes the command
    (tmp_path / "tc").write_text('#!/bin/sh\necho "tc $@"\n')
    (tmp_path / "tc").chmod(0o755)
    entry = [word.replace("$$", "$") for word in nodes["node0"]["entrypoint"]]
    done = subprocess.run([*entry, "echo", "a b"], env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert done.stdout.splitlines() == ["tc qdisc add dev eth0 root tbf rate 100mbit burst 64kb latency 100ms", "a b"]
