"""Processes that verbs start import what the verb itself would, whatever lies in the current directory."""

import subprocess
import sys
from pathlib import Path

import pytest

import thinwire
from thinwire.core.events import python

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(sys.version_info < (3, 11), reason="Python adds the current directory and knows no -P"),
]
VERBS = {
    "probe": ["probe", "--max-bytes", "8192", "--seconds", "0.5"],
    "profile": ["profile", "mlp:width=16", "--workers", "2", "--steps", "1", "--warmup", "0"],
    "bench": ["bench", "--model", "mlp:width=16", "--methods", "ssgd", "--steps", "2", "--warmup", "0"],
    "ps": ["ps", "run", "--model", "mlp:width=16", "--nodes", "1", "--workers", "2", "--updates", "2"],
}


@pytest.fixture
def verb(tmp_path):
    """A script that stands elsewhere, as the installed one does, and a directory in which files have Python's names."""
    script, here = tmp_path / "bin" / "verb.py", tmp_path / "here"
    script.parent.mkdir()
    here.mkdir()
    script.write_text("from thinwire.tools.cli.main import run\n\nrun()\n")
    for name in ("random", "re", "json"):
        (here / f"{name}.py").write_text("raise RuntimeError('not the one of the standard library')\n")

    def run(*words):
        command = [sys.executable, str(script), *words]
        return subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=250)

    return run


def test_python_is_started_by_nobody_but_the_function_that_looks_elsewhere():
    """The lab's own two are isolated (``-I``), and Flower's only say where its scripts lie."""
    package = Path(thinwire.__file__).parent
    found = {
        path.relative_to(package).as_posix() for path in package.rglob("*.py") if "sys.executable" in path.read_text()
    }
    assert found == {
        "core/events.py",
        "tools/lab/ranks.py",
        "tools/lab/network.py",
        "systems/federated/flower/deploy.py",
    }


def test_a_file_with_a_name_of_the_standard_library_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "random.py").write_text("raise RuntimeError('not the one of the standard library')\n")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    monkeypatch.chdir(tmp_path)
    done = subprocess.run(python("-c", "import random"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", VERBS)
def test_files_with_names_of_the_standard_library_disturb_no_verb(verb, name):
    done = verb(*VERBS[name])
    assert done.returncode == 0, done.stderr
