"""``thinwire kfac tune``: the grid, the verdict, the picture; and the commands of docs/kfac.md."""

import json
import re
import shlex
from pathlib import Path

import pytest

from fences import outputs
from thinwire.systems.kfac.tuning import Trial, best, lowest_of_sgd
from thinwire.tools.report.inputs import read_files
from thinwire.tools.report.runs import RunPicture
from verbs import call

ROOT = Path(__file__).parents[3]
SHOWN = outputs((ROOT / "docs" / "kfac.md").read_text())
TUNE = "thinwire kfac tune --plot tune.png"
PLAN = "thinwire kfac plan resnet50 --workers 16 --link 10gbit"

MINE = """
import torch

def small():
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    def loss(model, step, rank):
        x = torch.randn(32, 6, generator=torch.Generator().manual_seed(step))
        return torch.nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())
    return model, loss
"""


def run(words):
    return call(*shlex.split(words)[1:]).stdout


ROW = re.compile(r"^ (SGD|0\.\d+) +([\d.]+) +([\d.]+) +(?:(\d+) )?", re.MULTILINE)  # steps, where it came so far


@pytest.mark.slow
def test_the_pages_tuning():
    """Steps and losses are those of the page, whatever the seconds."""
    text = run(TUNE)
    found, said = ({(row[0], row[1]): row[2:] for row in ROW.findall(given)} for given in (text, SHOWN[TUNE]))
    assert len(said) == 12
    assert set(found) == set(said)
    for key, (loss, steps) in said.items():
        assert float(found[key][0]) == pytest.approx(float(loss), rel=0.02)
        assert found[key][1] == steps
    assert re.match(r"12 runs of 200 steps: at most about \d+", text)
    assert "to 2.39: K-FAC takes 40 steps and" in text  # whether SGD is sooner is the machine's affair
    assert Path("tune.png").stat().st_size > 1000
    assert max(map(len, text.splitlines())) <= 80


def test_the_pages_plan():
    rows = re.compile(r"^ (spd|mpd|dkfac|kaisa:1/2) +.*$", re.MULTILINE)
    assert [m[0].split() for m in rows.finditer(run(PLAN))] == [m[0].split() for m in rows.finditer(SHOWN[PLAN])]
    assert len(rows.findall(SHOWN[PLAN])) == 4


def test_a_model_of_ones_own_and_its_json():
    Path("mine_to_tune.py").write_text(MINE)
    words = "thinwire kfac tune mine_to_tune:small --dampings 0.01,0.1 --rates 0.1 --steps 40"
    data = json.loads(run(f"{words} --json"))
    assert {(one["damping"], one["rate"]) for one in data["trials"]} == {(None, 0.1), (0.01, 0.1), (0.1, 0.1)}
    assert all(one["steps"] == list(range(0, 41, 2)) and len(one["losses"]) == 21 for one in data["trials"])
    assert data["target"] == min(min(one["losses"][1:]) for one in data["trials"] if one["damping"] is None)
    Path("tune.json").write_text(json.dumps(data))
    (drawn,) = read_files([Path("tune.json")]).of(RunPicture)
    assert [panel.x for panel in drawn.picture.panels] == ["steps", "seconds"]
    assert [line.name for line in drawn.picture.panels[0].lines] == ["SGD", "K-FAC damping 0.01", "K-FAC damping 0.1"]


def test_what_diverges_is_said_and_not_drawn():
    words = "thinwire kfac tune teacher --dampings 1e-9,0.03 --rates 3 --steps 40 --kl-clip 0 --target 3"
    text = run(words)
    assert "diverged" in text
    lines = json.loads(run(f"{words} --json"))["picture"]["panels"][0]["lines"]
    assert all(max(line["y"]) < 50 for line in lines)


def test_the_line_for_a_script():
    """SGD is given too few steps to come to the target, so K-FAC is first however slow the machine is."""
    text = run("thinwire kfac tune --dampings 0.003 --rates 0.1 --steps 60 --target 2 --inv-update-steps 10")
    assert "SGD does not reach it" in text
    assert "next: KFAC(model, sync, damping=0.003, method='inverse', kl_clip=0.001," in text


def trial(damping, rate, losses, each=0.01, diverged=False):
    steps = tuple(range(0, 10 * len(losses), 10))
    return Trial(damping, rate, steps, tuple(each * step for step in steps), tuple(losses), diverged)


def test_who_is_first():
    plain, slow = trial(None, 0.1, [4, 3, 2, 1]), trial(0.1, 0.1, [4, 3.5, 3, 2.5], 0.02)
    quick, even = trial(0.01, 0.1, [4, 1, 0.9, 0.8], 0.02), trial(0.003, 0.1, [4, 1, 0.9, 0.7], 0.03)
    gone = trial(1e-6, 0.1, [4, 0.5, 90], diverged=True)
    runs = [gone, slow, plain, quick, even]
    assert lowest_of_sgd(runs) == 1
    assert best(runs, 1.0) == [even, quick, plain, slow, gone]
    assert lowest_of_sgd([quick, trial(None, 1, [4, 99], diverged=True)]) is None
    assert quick.reached(1.0) == (10, 0.2)
    assert slow.reached(1.0) is None
