"""What ``import thinwire`` brings along: nothing; its names: torch, and nothing that is for extras or for a verb."""

import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

import thinwire

ROOT = Path(__file__).parents[2]
FOR_VERBS = {"typer", "rich", "thinwire.tools.cli", "thinwire.tools.lab", "thinwire.tools.bench"}
FOR_EXTRAS = {
    "matplotlib", "plotly", "transformers", "sklearn", "scipy", "pandas", "safetensors", "cryptography", "PIL",
    "skimage", "tensorboard", "flwr", "lightning", "accelerate", "torchdata", "webdataset", "streaming",
}  # fmt: skip
SLOW = {"sympy", "torch._dynamo", "torch._inductor", "torch.utils.tensorboard", "torchvision"}  # 0.3 to 1 s each
TRAINING = "tw.attach, tw.GradientSync, tw.LocalWorld, tw.ACP, tw.SSGD, tw.TopK, tw.StepLog, tw.ddp_hook, tw.checkpoint"


def imported(code):
    """Modules that code adds to an interpreter that has imported torch."""
    program = f"import sys, torch; before = set(sys.modules)\n{code}\nprint(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=True)
    return set(done.stdout.split())


def test_importing_the_package_imports_no_other():
    program = "import sys; before = set(sys.modules); import thinwire; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=True)
    assert {name.partition(".")[0] for name in done.stdout.split()} <= {"thinwire", "__future__"} | set(
        sys.stdlib_module_names
    )


def test_names_for_training_import_nothing_of_extras_nor_what_is_slow():
    new = imported(f"import thinwire as tw; {TRAINING}")
    assert "thinwire.engine.attach" in new
    for name in FOR_VERBS | FOR_EXTRAS | SLOW:
        assert name not in new, f"{name} is imported by {TRAINING}"


def test_a_plan_imports_no_compiler():
    arguments = ["plan", "resnet50", "--link", "1gbit", "--workers", "4"]
    new = imported(f"from thinwire.tools.cli.main import app; app({arguments}, standalone_mode=False)")
    assert "thinwire.predict.choose.rank" in new
    assert not new & SLOW


def test_the_version_is_said_once():
    said = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert said
    assert said[1] == thinwire.__version__


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
