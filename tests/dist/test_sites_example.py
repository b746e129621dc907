"""The example of two sites as its page runs it, and the page's count of memory."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from verbs import call

pytestmark = pytest.mark.dist
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "sites"
COUNTED = "local:sync_every=32:codec=int2:fragments=8,local:sync_every=32:codec=int2:fragments=8:anchors=cpu"


def _train(folder, steps):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = subprocess.run(
        [*launch, str(EXAMPLE / "train.py"), "--steps", str(steps)],
        cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_the_pages_training_and_its_continuation(tmp_path):
    said = _train(tmp_path, 16)
    (first,) = (float(loss) for loss in re.findall(r"loss ([0-9.]+)", said))
    assert 1.5 < first < 3.0  # 5.5 at the first step: the logarithm of 256 bytes
    sent, every = map(float, re.search(r"site: ([0-9.]+) MB; after every step it would be ([0-9]+) MB", said).groups())
    assert every / sent > 40
    said = _train(tmp_path, 32)
    assert "continued from step 16" in said
    assert float(re.search(r"step 32: loss ([0-9.]+)", said)[1]) < first + 0.1
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000016", "step-000032"]


def test_the_pages_count_of_memory(monkeypatch):
    monkeypatch.chdir(EXAMPLE)
    page = (ROOT / "docs" / "larger_than_a_card.md").read_text()
    for size, billions in (("7b", 6.74), ("70b", 69.0)):
        words = (
            "plan",
            f"llama:model:size={size}",
            "--memory",
            "--shards",
            "8",
            "--dtype",
            "bf16",
            "--methods",
            COUNTED,
        )
        told = json.loads(call(*words, "--json").stdout)
        assert told["elements"] / 1e9 == pytest.approx(billions, rel=0.005)
        on_card, beside = told["memory"]
        assert sum(row["device"] for row in on_card["rows"]) == on_card["device"]
        shown = [f"{count / 1e9:.2f} GB" for count in (on_card["device"], beside["device"], beside["host"])]
        assert f"| all, {size.removesuffix('b')} billion parameters | {' | '.join(shown)} |" in page
