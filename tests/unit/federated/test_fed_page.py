"""The commands of docs/federated.md do what the page says: in short runs, and with its figures in slow ones."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from fed_calls import call

from fences import outputs
from thinwire.systems.federated import History

ROOT = Path(__file__).parents[3]
SHOWN = outputs((ROOT / "docs" / "federated.md").read_text())
ONE = "thinwire federated run digits"
SIDE_BY_SIDE, PER_CLIENT, COMPRESSED, PRIVATE = (
    next(words for words in SHOWN if words.startswith(ONE) and part in words)
    for part in (",scaffold", "--per-client", "--compress", "noise_multiplier")
)
PREDICT = next(words for words in SHOWN if "predict" in words)
RANKS = next(words for words in SHOWN if words.startswith("torchrun"))


def run(words, *more):
    done = call(*shlex.split(words)[1:], *more, code=0)
    return done.stdout


ROW = re.compile(r"^ (?:Fed\w+|Scaffold)(?: \w+=\S+)* +([\d.]+) ", re.MULTILINE)


def accuracies(text):
    """All that an output says, in its last lines or, where it has one, in its table of algorithms."""
    return [float(x) for x in ROW.findall(text) or re.findall(r"accuracy ([\d.]+)", " ".join(text.split()))]


def last(text):
    return History.from_json(text).rounds[-1].evaluation


@pytest.mark.parametrize("words", [ONE, PER_CLIENT, COMPRESSED, f"{ONE} --devices 4"])
def test_short_runs(alone, words):
    history = History.from_json(run(words, "--rounds", 4, "--json"))
    found = history.rounds[-1].evaluation
    assert found["held-out loss"] < history.start["held-out loss"] - 0.01
    if words == PER_CLIENT:
        assert found["worst tenth"] < found["accuracy"] < 1


def test_predict(alone):
    rows = re.compile(r"^ (equal|lpt|pull|auto) +([\d.]+) +([\d.]+) +(\d+)%", re.MULTILINE)
    assert rows.findall(run(PREDICT)) == rows.findall(SHOWN[PREDICT])
    assert len(rows.findall(SHOWN[PREDICT])) == 4


@pytest.mark.slow
@pytest.mark.parametrize("words", [ONE, SIDE_BY_SIDE, PER_CLIENT, COMPRESSED, PRIVATE])
def test_the_pages_figures(alone, words):
    if words == PRIVATE and importlib.util.find_spec("opacus") is None:
        pytest.skip("pip install 'thinwire[privacy]'")
    text = run(words)
    said = accuracies(SHOWN[words]) or [float(re.findall(r"^ 50 +[\d.]+ +([\d.]+)", SHOWN[words], re.MULTILINE)[0])]
    found = accuracies(text)
    assert len(said) == (3 if words == SIDE_BY_SIDE else 2 if words == PRIVATE else 1)
    for number in said:
        assert min(abs(number - other) for other in found) <= 0.03
    if words != PRIVATE:
        assert min(found) >= 0.85
    if words == SIDE_BY_SIDE:
        assert (alone / "curves.png").stat().st_size > 1000


@pytest.mark.slow
def test_on_ranks(alone):
    words = shlex.split(RANKS)[1:]
    words[words.index("thinwire")] = str(Path(sys.executable).with_name("thinwire"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert accuracies(done.stdout)[0] >= 0.85
