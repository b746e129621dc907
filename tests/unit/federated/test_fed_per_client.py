"""How the model serves each client: against numpy, on data of which the answer is known."""

import json

import numpy as np
import pytest
import torch
from fed_calls import MINE, SMALL, call

from thinwire.systems import federated as fl


class Shares:
    """Clients whose only datum is the share that is right."""

    def __init__(self, shares):
        self.shares = shares

    def __len__(self):
        return len(self.shares)

    def samples(self, client):
        return 1

    def load(self, client):
        return (torch.tensor([self.shares[client]]),)


def right(model, data):
    return float(data[0])


@pytest.mark.parametrize("count", [1, 2, 10, 11, 57])
def test_median_and_worst_tenth_are_numpys(count):
    shares = np.random.default_rng(count).random(count)
    found = fl.over_clients(right, Shares(shares))(torch.nn.Linear(1, 1), 0)
    assert found["median client"] == pytest.approx(np.median(shares), abs=1e-6)
    few = int(np.ceil(count / 10))
    assert found["worst tenth"] == pytest.approx(np.partition(shares, few - 1)[:few].mean(), abs=1e-6)


def test_of_many_clients_some_are_looked_at_and_always_the_same():
    looked = []
    clients = Shares(np.linspace(0, 1, 400))
    load = clients.load
    clients.load = lambda client: looked.append(client) or load(client)
    evaluate = fl.over_clients(right, clients, most=50)
    once, again = evaluate(torch.nn.Linear(1, 1), 0), evaluate(torch.nn.Linear(1, 1), 1)
    assert once == again
    assert len(set(looked)) == 50
    assert looked[:50] == looked[50:]
    with pytest.raises(ValueError, match="most=0"):
        fl.over_clients(right, clients, most=0)


def test_held_out_samples_come_in_the_clients_own_mix():
    draw = np.random.default_rng(0)
    labels, others = draw.integers(0, 5, 600), draw.integers(0, 5, 200)
    parts = fl.partition.dirichlet(labels, 12, alpha=0.3, least=5)
    found = fl.partition.alike(labels, parts, others, samples=2000)
    for part, drawn in zip(parts, found, strict=True):
        own = np.bincount(labels[part], minlength=5) / len(part)
        assert np.bincount(others[drawn], minlength=5) / 2000 == pytest.approx(own, abs=0.05)
    with pytest.raises(ValueError, match="no other samples of class 4"):
        fl.partition.alike(labels, parts, others[others < 4])


def test_the_verb(alone):
    done = call(*SMALL, "--per-client", "--json", code=0)
    data = json.loads(done.stdout)
    assert set(data["rounds"][-1]["evaluation"]) == {"accuracy", "held-out loss", "median client", "worst tenth"}
    panels = {panel["y"]: panel for panel in data["picture"]["panels"]}
    assert panels["worst tenth"]["y_range"] == [0, 1]
    (alone / "mine_without.py").write_text(MINE)
    done = call("federated", "run", "mine_without:build", "--per-client", code=2)
    assert "give mine_without:build a per_client=" in done.output
