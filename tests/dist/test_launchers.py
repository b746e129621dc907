"""examples/launchers/train.py, started in the ways of docs/launchers.md, ends with the same bits."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spawned import free_port

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "examples" / "launchers" / "train.py")
PAGE = (ROOT / "docs" / "launchers.md").read_text()
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

pytestmark = pytest.mark.dist


def environment(**more):
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


def result(text):
    (line,) = set(re.findall(r"(\w+: [\d.]+% of what was held out, loss \S+; .* by a worker)", text))
    return line


def run(command, cwd, **more):
    done = subprocess.run(
        command, cwd=cwd, env=environment(**more), capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return result(done.stdout + done.stderr)


def torchrun(method, cwd):
    return run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT, method], cwd
    )


@pytest.mark.slow
def test_by_torchrun(tmp_path):
    line = torchrun("local", tmp_path)
    accuracy, loss = re.search(r"local: ([\d.]+)% .* loss ([\d.]+)", line).groups()
    assert float(accuracy) > 88
    assert float(loss) < 0.45


@pytest.mark.slow
@pytest.mark.parametrize("method", ["acp", "local"])
def test_by_the_variables_of_a_pytorchjob(method, tmp_path):
    meet = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, SCRIPT, method],
            cwd=tmp_path, env=environment(RANK=str(rank), **meet), stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    told = [rank.communicate(timeout=250)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert result(told[0]) == torchrun(method, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["acp", "local"])
def test_by_ray_train(method, tmp_path):
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed here: pip install 'ray[train]'")
    assert run([sys.executable, SCRIPT, method], tmp_path, RAY_DEDUP_LOGS="0") == torchrun(method, tmp_path)


def test_the_slurm_script_is_one(tmp_path):
    (script,) = re.findall(r"<!-- slurm -->\n```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert SCRIPT.removeprefix(f"{ROOT}/") in script
    done = subprocess.run([shutil.which("bash"), "-n"], input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_pytorchjob_is_one():
    yaml = pytest.importorskip("yaml")
    (text,) = re.findall(r"<!-- pytorchjob -->\n```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    replicas = yaml.safe_load(text)["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["replicas"] == 1
    assert replicas["Worker"]["template"] == replicas["Master"]["template"]
    (container,) = replicas["Worker"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"  # the operator looks for this name
    assert (ROOT / container["command"][1]).exists()
