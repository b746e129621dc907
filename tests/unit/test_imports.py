"""What ``import thinwire`` brings along: nothing; its names: torch, and nothing that is for extras or for a verb."""

import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOR_VERBS = {"typer", "rich", "thinwire.tools.cli", "thinwire.tools.lab", "thinwire.tools.bench"}
FOR_EXTRAS = {
    "matplotlib", "plotly", "transformers", "sklearn", "scipy", "pandas", "safetensors", "cryptography", "PIL",
    "skimage", "tensorboard", "flwr", "lightning", "accelerate", "torchdata", "webdataset", "streaming",
}  # fmt: skip
SLOW = {"sympy", "torch._dynamo", "torch._inductor", "torch.utils.tensorboard", "torchvision"}  # 0.3 to 1 s each
TRAINING = "tw.attach, tw.GradientSync, tw.LocalWorld, tw.ACP, tw.SSGD, tw.TopK, tw.StepLog, tw.ddp_hook, tw.checkpoint"


PLAN = ["plan", "resnet50", "--link", "1gbit", "--workers", "4", "--methods", "acp:rank=4"]
PROGRAM = f"""
import sys
before = set(sys.modules)
def news():
    print(*(set(sys.modules) - before))
    before.update(sys.modules)
import thinwire as tw
news()
import torch
before.update(sys.modules)
{TRAINING}
news()
from thinwire.tools.cli.main import app
sys.stdout, out = sys.stderr, sys.stdout
app({PLAN}, standalone_mode=False)
sys.stdout = out
news()
"""


def test_what_each_way_of_use_imports():
    """The package alone; its names for training; a verb."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=200, check=True)
    alone, training, plan = (set(line.split()) for line in done.stdout.splitlines())
    own = {"thinwire", "__future__"} | set(sys.stdlib_module_names)
    assert {name.partition(".")[0] for name in alone} <= own
    assert "thinwire.engine.attach" in training
    assert not training & (FOR_VERBS | FOR_EXTRAS | SLOW)
    assert "thinwire.predict.choose.rank" in training | plan
    assert not plan & SLOW


def test_the_package_is_typed():
    assert files("thinwire").joinpath("py.typed").is_file()


@pytest.mark.parametrize(
    ("typed", "offered"), [("thinwire p", ["probe", "profile", "plan", "ps"]), ("thinwire lab r", ["run"])]
)
def test_the_shell_completes(typed, offered):
    words = {"_THINWIRE_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    code = "import sys; sys.argv = ['thinwire']; from thinwire.tools.cli.main import app; app(prog_name='thinwire')"
    done = subprocess.run([sys.executable, "-c", code], env=words, capture_output=True, text=True, timeout=200)
    assert sorted(done.stdout.split()) == sorted(offered), done.stderr
