"""The command of docs/kfac.md and examples/kfac/README.md: K-FAC comes to the loss, SGD does not, both are drawn."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from verbs import call

pytestmark = [pytest.mark.net, pytest.mark.slow, pytest.mark.usefixtures("no_leftovers")]
ROOT = Path(__file__).parents[2]


def test_the_pages_example(tmp_path, monkeypatch):
    (command,) = re.findall(
        r"^thinwire (lab run .*\\\n.*kfac.png)$", (ROOT / "docs" / "kfac.md").read_text(), re.MULTILINE
    )
    words = shlex.split(command.replace("\\\n", "").replace("examples/", f"{ROOT}/examples/"))
    words[words.index("python")] = sys.executable
    monkeypatch.chdir(tmp_path)
    done = call(*words, "--steps", 400)
    assert "kfac: reached 0.3 after 250 steps" in done.output
    assert "sgd: is at" in done.output
    assert (tmp_path / "kfac.png").stat().st_size > 1000
