"""What a run prints and draws: the untrained model, algorithms side by side, how it goes on, what does not fit."""

import json

import pytest
from fed_calls import MINE, SMALL, call

from thinwire.systems.federated import History
from thinwire.systems.federated.history import history_picture
from thinwire.systems.federated.server import evaluation_due
from thinwire.tools.report.inputs import read_files
from thinwire.tools.report.runs import RunPicture


def test_the_untrained_model_is_evaluated(alone):
    done = call(*SMALL, "--json")
    history = History.from_json(done.stdout)
    untrained, trained = history.start, {row.round: row.evaluation for row in history.rounds}
    assert set(untrained) == set(trained[0]) == {"accuracy", "held-out loss"}
    assert list(trained) == [0, 1]
    assert untrained["held-out loss"] == pytest.approx(2.303, abs=0.05)  # ln 10: it guesses
    assert History.from_json(history.to_json()) == history
    accuracy = json.loads(done.stdout)["picture"]["panels"][0]
    assert accuracy["lines"][0]["x"] == [0, 1, 2]
    assert accuracy["lines"][0]["y"][0] == untrained["accuracy"]
    assert (accuracy["y_range"], accuracy["levels"]) == ([0, 1], [{"y": 0.1, "text": "chance"}])


@pytest.mark.parametrize("rounds, every, due", [(50, None, 18), (20, None, 21), (3, None, 4), (50, 0, 1), (7, 3, 4)])
def test_how_often_is_evaluated(rounds, every, due):
    assert sum(evaluation_due(round, rounds, every) for round in range(-1, rounds)) == due


def test_algorithms_side_by_side(alone):
    words = ["--algorithm", "fedavg,fedavg:lr=0.01,scaffold", "--checkpoint-dir", "runs"]
    done = call(*SMALL, *words, "--plot", "curves.png", code=0)
    lines = done.stdout.splitlines()
    rows = {line[1:15].strip(): line.split() for line in lines if line.startswith((" FedAvg", " Scaffold"))}
    assert list(rows) == ["FedAvg", "FedAvg lr=0.01", "Scaffold"]
    assert "written: curves.png" in lines
    assert " ".join(lines[-3:-1]).startswith("Scaffold, after 2 rounds: training loss")
    assert "(chance: 0.1)" in " ".join(lines[-3:])
    assert max(map(len, lines)) <= 80
    assert sorted(path.name for path in (alone / "runs").iterdir()) == ["fedavg", "fedavg-lr=0.01", "scaffold"]
    data = call(*SMALL, *words, "--json").stdout
    found = json.loads(data)
    assert [History.from_json(json.dumps(run)).about["lr"] for run in found["runs"].values()] == [0.2, 0.01, 0.2]
    (alone / "runs.json").write_text(data)
    (run,) = read_files([alone / "runs.json"]).of(RunPicture)
    assert [[line.name for line in panel.lines] for panel in run.picture.panels] == [list(rows)] * 4
    alone_again = History.from_json(call(*SMALL, "--algorithm", "fedavg:lr=0.01", "--json").stdout)
    assert alone_again.rounds[-1].evaluation == found["runs"]["FedAvg lr=0.01"]["rounds"][-1]["evaluation"]


def test_a_run_that_goes_on_says_so(alone):
    begin, more = [*SMALL, "--checkpoint-dir", "run"], [*SMALL[:3], "--rounds", "3", *SMALL[-2:]]
    first = call(*begin, "--out", "w.safetensors")
    assert "going on" not in first.output
    assert "written: w.safetensors" in first.stdout
    assert "round 2 of 2  FedAvg  training loss" in first.stderr
    assert "run already contains 2 rounds" in call(*begin).stderr
    again = call(*more, "--checkpoint-dir", "run", "--json")
    assert "FedAvg: continuing from round 2" in again.stderr
    assert History.from_json(again.stdout).start == History.from_json(call(*begin, "--json").stdout).start


def test_what_does_not_fit_into_80_columns_is_named(alone):
    numbers = {f"a number of the user's own, {i}": i for i in range(4)}
    (alone / "mine_with_many.py").write_text(
        MINE.replace("clients_per_round=3", f"clients_per_round=3, evaluate=lambda model, round: {numbers}")
    )
    done = call("federated", "run", "mine_with_many:build", "--devices", 2)
    assert "…" not in done.stdout
    assert "no room here for: a number of the user's own, 1, a number" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    "name, evaluate, words",
    [
        ("mine_that_raises", "lambda model, round: {}['x']", "mine_that_raises.py, line 12: KeyError: 'x'"),
        (
            "mine_of_nothing",
            "lambda model, round: None",
            'must return numbers by name, such as {"accuracy": 0.9}, not None',
        ),
    ],
)
def test_an_evaluation_that_fails_is_a_sentence(alone, name, evaluate, words):
    (alone / f"{name}.py").write_text(MINE.replace("clients_per_round=3", f"clients_per_round=3, evaluate={evaluate}"))
    done = call("federated", "run", f"{name}:build")
    assert done.exit_code in (1, 2)
    assert words in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--algorithm", "fedavg,fedavg"], "names FedAvg twice"),
        (["--algorithm", ","], "name one, or several"),
        (["--algorithm", "fedavg,mime", "--out", "x"], "--out takes the weights of one algorithm"),
        (["--out", "/nowhere/x"], "is not a file that can be written"),
        (["--plot", "/nowhere/x.png"], "is not a file that can be written"),
    ],
)
def test_what_does_not_go_together_is_a_sentence(alone, arguments, words):
    done = call("federated", "run", *arguments, code=2)
    assert words in done.output


def test_a_picture_of_runs_without_evaluation_has_the_training_loss_alone(alone):
    done = call("federated", "run", "million:clients=20", "--rounds", 2, "--clients-per-round", 5, "--json")
    picture = history_picture({"Scaffold": History.from_json(done.stdout)}, "a run")
    assert [(panel.x, panel.y) for panel in picture.panels] == [
        ("rounds", "training loss"), ("seconds", "training loss"),
    ]  # fmt: skip
    assert picture.panels[0].lines[0].x == (1, 2)
