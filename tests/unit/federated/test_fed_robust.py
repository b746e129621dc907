"""FedRobust against numpy's median and scipy's trimmed mean, and with clients that lie, where the mean fails."""

import numpy as np
import problems as p
import pytest
import torch
from scipy import stats

from thinwire.systems import federated as fl
from thinwire.systems.federated.algorithms import middle_of

RULES = {"median": lambda rows: np.median(rows, 0), "trimmed": lambda rows: stats.trim_mean(rows, 0.2, 0)}


def by_hand(data, plan, rule, lr=0.1, steps=3):
    theta = np.full(p.D, 0.3)
    for cohort in plan:
        rows = []
        for i in cohort:
            x = theta.copy()
            for _ in range(steps):
                x -= lr * p.gradient(data[i], x)
            rows.append(x - theta)
        theta = theta + RULES[rule](np.array(rows))
    return theta


@pytest.mark.parametrize("rule, cohort", [*zip([*RULES] * 3, (1, 2, 5, 6, 11)), ("trimmed", 11), ("median", 6)])
def test_the_formula(rule, cohort):
    data = p.population(11)
    found, history = p.train(
        fl.FedRobust(lr=0.1, epochs=3, batch_size=None, rule=rule), data, rounds=4, clients_per_round=cohort, devices=3
    )
    wanted = by_hand(data, p.cohorts(data, 4, cohort), rule)
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)
    each = p.D * 8
    assert [row.client_bytes for row in history.rounds] == [cohort * each] * 4
    assert [row.bytes_up + row.control_bytes for row in history.rounds] == [cohort * each] * 4


@pytest.mark.parametrize("count", [1, 2, 3, 10, 31])
def test_the_middle_of_rows_is_scipys(count):
    rows = np.random.default_rng(count).standard_cauchy((count, 50))
    for trim in (0.0, 0.1, 0.29, 0.49):
        found = middle_of(torch.tensor(rows), int(trim * count))
        np.testing.assert_allclose(found, stats.trim_mean(rows, trim, 0), rtol=1e-12)


def lying(cls, share):
    """The class, with clients of which every so many send the opposite, ten times as large, and claim a lot of data."""

    class Lying(cls):
        def train(self, context, payload, state):
            result = super().train(context, payload, state)
            if context.client % round(1 / share):
                return result
            away = {name: -10 * x for name, x in {**result.reduce, **result.collect}.items()}
            if result.collect:
                return fl.ClientResult(collect=away, samples=1000)
            return fl.ClientResult(away, samples=1000)

    return Lying


@pytest.fixture(scope="module")
def blobs():
    draw = torch.Generator().manual_seed(0)
    centres = torch.randn(4, 6, generator=draw)
    labels = torch.randint(4, (1200,), generator=draw)
    x = centres[labels] + 0.4 * torch.randn(1200, 6, generator=draw)
    return x, labels


def accuracy(algorithm, blobs):
    x, labels = blobs
    clients = fl.ArrayClients((x[:1000], labels[:1000]), fl.partition.dirichlet(labels[:1000], 40, 1.0))
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4)

    def evaluate(model, round):
        return {"accuracy": (model(x[1000:]).argmax(1) == labels[1000:]).float().mean()}

    history = fl.simulate(algorithm, model, clients, rounds=12, clients_per_round=20, evaluate=evaluate)
    return history.rounds[-1].evaluation["accuracy"]


def test_clients_that_lie_undo_the_mean_and_not_the_robust_rules(blobs):
    options = {"lr": 0.2, "epochs": 2, "batch_size": 10}
    assert accuracy(fl.FedAvg(**options), blobs) > 0.9
    assert accuracy(lying(fl.FedAvg, 1 / 5)(**options), blobs) < 0.5
    for rule in RULES:
        robust = {"rule": rule, "trim": 0.3, **options}
        assert accuracy(fl.FedRobust(**robust), blobs) > 0.9
        assert accuracy(lying(fl.FedRobust, 1 / 5)(**robust), blobs) > 0.9


def test_an_answer_of_another_shape_is_not_counted():
    class Short(fl.FedRobust):
        def train(self, context, payload, state):
            result = super().train(context, payload, state)
            if context.client < 2:
                return fl.ClientResult(collect={"delta": torch.full((2,), 1e9)} if context.client else {})
            return result

    data = p.population(7)
    found, _ = p.train(Short(lr=0.1, epochs=3, batch_size=None), data, rounds=1)
    np.testing.assert_allclose(found, by_hand(data[2:], [range(5)], "median"), rtol=1e-12)
    with pytest.raises(ValueError, match="no client of round 0 has answered with a change of the model's shape"):
        p.train(Short(), p.population(2), rounds=1)
