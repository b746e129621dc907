"""examples/splitfed: fronts averaged by `federated`, one back trained across the cut by `split`."""

import copy
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from split_ends import parameters

from thinwire.systems import federated as fl
from thinwire.systems.split import CloudEnd, EdgeEnd, Recipe, SplitPlan, split_model
from thinwire.systems.split.models import preset
from thinwire.systems.split.tasks import Task, TextData

EXAMPLE = Path(__file__).parents[3] / "examples" / "splitfed"
RECIPE = Recipe(learning_rate=3e-3, epochs=2, batch_size=8)


@pytest.fixture
def split_fed(monkeypatch):
    spec = importlib.util.spec_from_file_location("splitfed", EXAMPLE / "splitfed.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "splitfed", module)
    spec.loader.exec_module(module)
    return module.SplitFed


def made():
    """Two clients of unlike size, and the halves."""
    draw = torch.Generator().manual_seed(0)
    tokens = [[4, *torch.randint(1, 4, (5,), generator=draw).tolist()] for _ in range(40)]
    labels = [max(set(row[1:]), key=row[1:].count) - 1 for row in tokens]
    shares = [TextData(tokens[:24], labels[:24]), TextData(tokens[24:], labels[24:])]
    plan = SplitPlan(1, rank=4, up=("int8", "pack"), down=("int8", "pack"))
    model = preset("bert", classes=3, vocabulary=5, length=8, layers=2, hidden=32, heads=4)
    return shares, Task("toy", *shares, 3, 5, "accuracy", "toy"), *split_model(model, plan)


def test_rounds_are_those_of_the_paper_written_out(split_fed):
    shares, task, front, back = made()
    rounds = 2
    algorithm = split_fed(cloud=CloudEnd(copy.deepcopy(back), "pair", RECIPE), recipe=RECIPE, rounds=rounds)
    trained = copy.deepcopy(front)
    clients = fl.FunctionClients(2, shares.__getitem__, lambda client: len(shares[client]))
    scores = []
    history = fl.simulate(
        algorithm, trained, clients, rounds=rounds, clients_per_round=2, evaluate_every=1,
        evaluate=lambda model, round: scores.append(algorithm.score(model, task)) or {"accuracy": scores[-1]},
    )  # fmt: skip
    assert [record.failed for record in history.rounds] == [{}, {}]

    cloud, average = CloudEnd(copy.deepcopy(back), "pair", RECIPE), front
    losses = []
    for round in range(rounds):
        fronts = []
        for client, data in enumerate(shares):
            per_round = 2 * -(-len(data) // 8)
            edge = EdgeEnd(
                copy.deepcopy(average), "pair", RECIPE, rounds * per_round, f"client-{client}", steps=round * per_round
            )
            edge.open(cloud.handle, cloud.hello(edge.hello()))
            for epoch in (2 * round, 2 * round + 1):
                losses += [float(edge.step(data.batch(rows))) for rows in RECIPE.batches(len(data), epoch)]
            edge.bye()
            fronts.append(edge.half)
        average = copy.deepcopy(front)
        with torch.no_grad():
            for mean, first, second in zip(average.parameters(), *(each.parameters() for each in fronts)):
                mean.copy_(0.6 * first + 0.4 * second)  # 24 samples and 16
    torch.testing.assert_close(parameters(trained), parameters(average), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(parameters(algorithm.cloud.half), parameters(cloud.half), rtol=1e-4, atol=1e-5)
    assert history.rounds[0].metrics["loss"] == pytest.approx(0.6 * mean_of(losses[:6]) + 0.4 * mean_of(losses[6:10]))
    assert algorithm.ledger.messages["z"] == len(losses) == 20  # training alone: what is judged is not counted
    assert history.rounds[-1].evaluation == {"accuracy": scores[-1]}
    assert algorithm.ledger.state == 2 * (4 * 40) * 6 * (4 + 2)  # both ways, samples, tokens, codes and a scale


def mean_of(numbers):
    return sum(numbers) / len(numbers)
