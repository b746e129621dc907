"""Where public simulators have gone wrong: state that leaks, buffers, cohorts, failures, the user's generators."""

import random

import numpy as np
import problems as p
import pytest
import torch
from torch import nn

from thinwire.systems import federated as fl
from thinwire.systems.federated.data import sample

DATA = p.population()
EVEN = p.population(sizes=[4, 6, 8, 6, 4, 8])  # no batch of one sample, which BatchNorm refuses


class Leaky(nn.Module):
    """Dropout, BatchNorm, a frozen parameter that training changes, an integer buffer: everything that could leak."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(p.D, 5).double()
        self.norm = nn.BatchNorm1d(5).double()
        self.outer = nn.Linear(5, 1).double()
        self.frozen = nn.Parameter(torch.ones(1, dtype=torch.float64), requires_grad=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.frozen.data.mul_(1.01)
        hidden = torch.dropout(self.norm(self.inner(x)), 0.5, self.training)
        return self.outer(hidden) * self.frozen + 0.1 * self.calls


def train_leaky(order, monkeypatch):
    torch.manual_seed(1)
    net = Leaky()
    monkeypatch.setattr(fl.FedAvg, "select", lambda self, round, population, clients_per_round, seed: order[round])
    algorithm, options = fl.FedAvg(lr=0.1, batch_size=4, epochs=2), {"rounds": 2, "clients_per_round": 4}
    fl.simulate(algorithm, net, p.as_clients(EVEN), **options, loss=p.loss, reduction="exact")
    return torch.cat([x.detach().double().reshape(-1) for x in net.state_dict().values()]).numpy()


def test_nothing_of_one_client_leaks_into_the_next(monkeypatch):
    """Of no kind of state: the cohort in another order gives the same bits."""
    forward = train_leaky([[0, 1, 2, 3], [1, 3, 4, 5]], monkeypatch)
    backward = train_leaky([[3, 2, 1, 0], [5, 4, 3, 1]], monkeypatch)
    assert np.array_equal(forward, backward)


class Odd(nn.Module):
    """Buffers of which each needs a decision of its own."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(p.D, 1, bias=False).double()
        self.register_buffer("mask", torch.full((2,), -torch.inf))
        self.register_buffer("least", torch.full((1,), torch.inf))
        self.register_buffer("wide", torch.zeros(1).expand(3))
        self.register_buffer("whole", torch.zeros(1, dtype=torch.int64).expand(3))
        self.register_buffer("sparse", torch.eye(2).to_sparse())

    def forward(self, x):
        rows = float(len(x))
        self.least.fill_(torch.nan if rows == 3 else rows)
        self.wide.data = torch.full((3,), rows)
        self.whole = self.whole + 1  # stays the server's
        return self.linear(x)


@pytest.mark.parametrize("reduction", ["fp32", "fp64", "exact"])
def test_each_buffer_is_averaged_over_the_clients_where_it_is_finite(reduction):
    clients = p.as_clients(DATA[:3])
    sizes = [clients.samples(i) for i in range(3)]
    assert sizes[0] == 3
    net = Odd()
    history = fl.simulate(
        fl.FedAvg(lr=0.01), net, clients, rounds=2, clients_per_round=3, loss=p.loss, reduction=reduction
    )
    assert not history.rounds[1].failed
    torch.testing.assert_close(net.least, torch.tensor([sum(n * n for n in sizes[1:]) / sum(sizes[1:])]).float())
    torch.testing.assert_close(net.wide, torch.full((3,), sum(n * n for n in sizes) / sum(sizes)))
    assert net.mask.tolist() == [-torch.inf] * 2
    assert net.whole.tolist() == [0] * 3
    assert torch.equal(net.sparse.to_dense(), torch.eye(2))


def test_t10_cohorts_depend_on_run_and_round_only():
    """B19: another run draws other clients, more devices do not."""
    draws = {(run, r): tuple(sample(run, r, 1_000_000, 50)) for run in range(3) for r in range(3)}
    assert len(set(draws.values())) == 9
    assert all(sorted(set(found)) == list(found) for found in draws.values())
    assert sample(0, 0, 5, 5) == [0, 1, 2, 3, 4]
    counts = np.zeros(20)
    for r in range(400):
        counts[sample(7, r, 20, 5)] += 1
    assert abs(counts - 100).max() < 45  # five standard deviations


def test_the_first_failure_of_a_run_is_told_once(caplog):
    clients = fl.FunctionClients(4, lambda i: (torch.ones(1 + (i > 1), 2), torch.zeros(1 + (i > 1)).long()), 2)
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    fl.simulate(fl.FedAvg(batch_size=2), net, clients, rounds=3, clients_per_round=4)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "in round 1, 2 of 4 clients failed" in said
    assert "client 0, for one: ValueError: Expected more than 1 value per channel" in said


def test_the_users_generators_and_model_are_left_alone():
    def drawn(between):
        torch.manual_seed(3)
        np.random.seed(3)
        random.seed(3)
        between()
        return torch.rand(1), np.random.rand(), random.random()

    algorithm, net = fl.FedAvg(lr=0.1, epochs=3, batch_size=None), p.model()  # to make it draws numbers
    assert drawn(lambda: p.train(algorithm, DATA, rounds=1, net=net)) == drawn(lambda: None)
