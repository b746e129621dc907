"""Defects of public simulators put back one at a time: each is caught by an identity that holds without it.

T1, T2, T4, T6 (fits, waiting) are in test_fed_schedule.py.
"""

import random

import numpy as np
import problems as p
import pytest
import torch
from torch import nn

from thinwire.systems import federated as fl
from thinwire.systems.federated import device
from thinwire.systems.federated.data import sample
from thinwire.systems.federated.state import ClientStateStore
from thinwire.systems.federated.workspace import Workspace

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


MUTATIONS = {
    "frozen parameters": lambda m: m.setattr(Workspace, "reset", _partial(frozen=False)),
    "integer buffers": lambda m: m.setattr(Workspace, "reset", _partial(integers=False)),
    "float buffers": lambda m: m.setattr(Workspace, "reset", _partial(floats=False)),
    "generators": lambda m: m.setattr(device, "seed_everything", lambda seed: None),
}


def _partial(frozen=True, integers=True, floats=True):
    whole = Workspace.reset

    def reset(self, theta, buffers):
        fixed = [x for x in self.model.parameters() if not x.requires_grad]
        kept_frozen = [x.clone() for x in fixed]
        kept = [b.clone() for b in self.model.buffers()]
        whole(self, theta, buffers)
        if not frozen:
            for x, old in zip(fixed, kept_frozen):
                x.data.copy_(old)
        for b, old in zip(self.model.buffers(), kept):
            if (b.dtype.is_floating_point and not floats) or (not b.dtype.is_floating_point and not integers):
                b.copy_(old)

    return reset


@pytest.mark.parametrize("mutation", [None, *MUTATIONS])
def test_nothing_of_one_client_leaks_into_the_next(mutation, monkeypatch):
    """T7 for all kinds of state: the cohort in another order gives the same bits, and with a leak it does not."""
    if mutation:
        MUTATIONS[mutation](monkeypatch)
    forward = train_leaky([[0, 1, 2, 3], [1, 3, 4, 5]], monkeypatch)
    backward = train_leaky([[3, 2, 1, 0], [5, 4, 3, 1]], monkeypatch)
    assert np.array_equal(forward, backward) == (mutation is None)


def test_batch_norm_is_averaged_and_integers_stay_the_servers():
    net = nn.Sequential(nn.Linear(p.D, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    clients = p.as_clients(DATA[:2])
    before = {k: v.clone() for k, v in net.state_dict().items()}
    ends = []
    for i in range(2):
        alone = nn.Sequential(nn.Linear(p.D, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
        alone.load_state_dict(before)
        alone(clients.load(i)[0])
        ends.append(alone[1].running_mean)
    fl.simulate(fl.FedAvg(lr=1e-12, batch_size=None), net, clients, rounds=1, clients_per_round=2, loss=p.loss)
    n = [clients.samples(i) for i in range(2)]
    torch.testing.assert_close(net[1].running_mean, (n[0] * ends[0] + n[1] * ends[1]) / sum(n))
    assert int(net[1].num_batches_tracked) == 0


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


def chaining(m):
    """T7: weights are not reloaded, so that each client goes on from the one before."""

    def train(self, context, payload, state):
        return fl.ClientResult({"delta": self.local_sgd(context, context.x.clone()).x - payload["theta"]})

    m.setattr(fl.FedAvg, "train", train)
    m.setattr(Workspace, "reset", lambda self, theta, buffers: None)


def overwriting(m):
    """T8a: deltas and variates are overwritten instead of added, so that only the last client counts."""

    def add(self, name, x, weight):
        self.sums[name], self.bounds[name] = x.detach().clone(), 0.0

    m.setattr(device.Accumulator, "add", add)


def forgetting(m):
    """T8b: states stay zero."""
    m.setattr(ClientStateStore, "put", lambda self, client, state, round: None)


def sharing(m):
    """T8c: a state belongs to the slot, not to the client."""
    put, get = ClientStateStore.put, ClientStateStore.get
    m.setattr(ClientStateStore, "put", lambda self, client, state, round: put(self, client % 2, state, round))
    m.setattr(ClientStateStore, "get", lambda self, client: get(self, client % 2))


def without_one_over_alpha(m):
    """T9: FedDyn's server forgets that h is divided by alpha."""

    def program(self, round):
        found = yield fl.RoundRequest({"theta": self.theta})
        self.h = self.h - (self.alpha / self.population) * found["change"]
        self.theta = found["x"] - self.h

    m.setattr(fl.FedDyn, "program", program)


@pytest.mark.parametrize(
    "cls, options, formula, defect, least",
    [
        (fl.FedAvg, {}, p.fedavg, chaining, 1e-3),
        (fl.Scaffold, {}, p.scaffold, overwriting, 1e-3),
        (fl.Scaffold, {}, p.scaffold, forgetting, 1e-6),
        (fl.Scaffold, {}, p.scaffold, sharing, 1e-6),
        (fl.FedDyn, {"alpha": 0.4}, p.feddyn, without_one_over_alpha, 1e-4),
    ],
)
def test_a_defect_that_is_put_back_shows(cls, options, formula, defect, least, monkeypatch):
    wanted = formula(DATA, p.cohorts(DATA, 5, 4), 0.1, lambda i: 3, **options)
    make = lambda: cls(lr=0.1, epochs=3, batch_size=None, **options)  # noqa: E731
    assert np.abs(p.train(make(), DATA, rounds=5, clients_per_round=4)[0] - wanted).max() < 1e-12
    defect(monkeypatch)
    assert np.abs(p.train(make(), DATA, rounds=5, clients_per_round=4)[0] - wanted).max() > least


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


def test_weights_fixed_before_training_would_lose_the_mass_of_the_failed(monkeypatch):
    class Fails(fl.FedAvg):
        def train(self, context, payload, state):
            if context.client == 5:
                raise ValueError("gone")
            return super().train(context, payload, state)

    wanted, _ = p.train(fl.FedAvg(batch_size=None), DATA[:5], rounds=1)
    found, _ = p.train(Fails(batch_size=None), DATA, rounds=1)
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    whole = device.Accumulator.result
    monkeypatch.setattr(device.Accumulator, "result", lambda self, name, factor, dtype: whole(self, name, 1.0, dtype))
    found, _ = p.train(Fails(batch_size=None), DATA, rounds=1)
    assert np.abs(found - wanted).max() > 1e-3


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
