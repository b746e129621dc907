"""DP-SGD: per-sample clipping against numpy, the size of the noise, Poisson batches, and what was spent."""

import importlib.util
import math

import numpy as np
import problems as p
import pytest
import torch
from fed_calls import SMALL, call
from torch import nn

from thinwire.systems import federated as fl
from thinwire.systems.federated.remote import RemoteNode, RemoteServer

DATA = p.population()
HAS_OPACUS = importlib.util.find_spec("opacus") is not None
needs_opacus = pytest.mark.skipif(not HAS_OPACUS, reason="pip install 'thinwire[privacy]'")


def clipped(client, x, limit):
    a, y = client
    each = (a @ x - y)[:, None] * a
    norms = np.linalg.norm(each, axis=1, keepdims=True)
    return (each * np.minimum(1, limit / (norms + 1e-6))).mean(0)


@needs_opacus
@pytest.mark.parametrize("cls", [fl.FedAvg, fl.FedRobust])
def test_each_sample_is_clipped_as_in_numpy(cls):
    limit = 0.3
    algorithm = cls(
        lr=0.1, epochs=3, batch_size=None, max_grad_norm=limit, noise_multiplier=1e-12, weights="uniform"
    )  # so little noise that only the clipping shows
    found, history = p.train(algorithm, DATA, rounds=2)
    theta = np.full(p.D, 0.3)
    for _ in range(2):
        deltas = []
        for client in DATA:
            x = theta.copy()
            for _ in range(3):
                x -= 0.1 * clipped(client, x, limit)
            deltas.append(x - theta)
        theta = theta + (np.mean(deltas, 0) if cls is fl.FedAvg else np.median(deltas, 0))
    np.testing.assert_allclose(found, theta, rtol=1e-9, atol=1e-9)
    assert not any(row.failed for row in history.rounds)
    again, _ = p.train(algorithm, DATA, rounds=2)
    assert (found == again).all()


class Still(nn.Module):
    """Gradients of zero: what moves the weights is noise."""

    def __init__(self, size):
        super().__init__()
        self.inner = nn.Linear(size, 1, bias=False)

    def forward(self, x):
        return 0 * self.inner(x)


@needs_opacus
def test_the_noise_is_as_large_as_was_asked_for():
    size, n, limit, noise, lr = 4000, 20, 0.5, 1.3, 0.1
    clients = fl.FunctionClients(1, lambda i: (torch.ones(n, size), torch.zeros(n)), n)
    model = Still(size)
    before = model.inner.weight.detach().clone()
    algorithm = fl.FedAvg(lr=lr, batch_size=5, max_steps=1, max_grad_norm=limit, noise_multiplier=noise)
    loss = lambda net, batch: net(batch[0]).mean()  # noqa: E731
    fl.simulate(algorithm, model, clients, rounds=1, clients_per_round=1, loss=loss)
    moved = (model.inner.weight.detach() - before).flatten()
    assert float(moved.std()) == pytest.approx(lr * noise * limit / 5, rel=0.05)  # 5: the batch that is expected
    assert abs(float(moved.mean())) < 4 * float(moved.std()) / math.sqrt(size)


@needs_opacus
def test_batches_are_drawn_sample_by_sample():
    n, batch, steps = 40, 10, 400
    sizes = []

    def loss(net, rows):
        sizes.append(len(rows[0]))
        return net(rows[0]).mean()

    clients = fl.FunctionClients(1, lambda i: (torch.ones(n, 2), torch.zeros(n)), n)
    algorithm = fl.FedAvg(epochs=100, batch_size=batch, max_grad_norm=1.0, noise_multiplier=1.0)
    fl.simulate(algorithm, nn.Linear(2, 1), clients, rounds=1, clients_per_round=1, loss=loss)
    assert len(sizes) == steps  # none of 400 was empty
    deviation = math.sqrt(n * 0.25 * 0.75)
    assert np.mean(sizes) == pytest.approx(batch, abs=4 * deviation / math.sqrt(steps))
    assert np.std(sizes) == pytest.approx(deviation, rel=0.15)


@needs_opacus
def test_what_was_spent_is_within_the_gaussian_mechanisms_bound():
    from thinwire.systems.federated.private import epsilons

    algorithm = fl.FedAvg(epochs=3, batch_size=None, max_grad_norm=1.0, noise_multiplier=4.0)
    clients = p.as_clients(DATA)
    found = epsilons(algorithm, clients, rounds=5, clients_per_round=6, seed=0)
    assert sorted(found) == list(range(6))
    steps, delta = 15, 1e-5  # whole batches: no amplification, Renyi epsilon = steps * order / (2 sigma^2)
    bound = min(steps * a / (2 * 16) + math.log(1 / delta) / (a - 1) for a in np.arange(1.1, 60, 0.1))
    assert all(0.5 * bound < epsilon <= bound for epsilon in found.values())
    few = epsilons(algorithm, clients, rounds=5, clients_per_round=2, seed=0)
    assert max(few.values()) < min(found.values())


@needs_opacus
def test_the_verb(alone):
    done = call(*SMALL, "--algorithm", "fedprox:noise_multiplier=1:max_grad_norm=1", code=0)
    assert "privacy spent, at delta 1e-05: epsilon" in done.stdout


@pytest.mark.skipif(HAS_OPACUS, reason="Opacus is there")
def test_without_opacus_it_says_what_to_install(alone):
    done = call(*SMALL, "--algorithm", "fedavg:noise_multiplier=1:max_grad_norm=1", code=2)
    assert "pip install 'thinwire[privacy]'" in done.output


def test_what_it_does_not_go_with():
    both = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
    made = fl.Federation(fl.FedAvg(**both), p.model(), p.as_clients(DATA))
    for words, make in (
        ("give both", lambda: fl.FedAvg(noise_multiplier=1.0)),
        ("noise_multiplier=0", lambda: fl.FedAvg(**{**both, "noise_multiplier": 0})),
        ("Mime", lambda: fl.Mime(**both)),
        ("it is for simulations", lambda: RemoteServer(made, {})),
        ("it is for simulations", lambda: RemoteNode(made, [0], "nowhere")),
    ):
        with pytest.raises(ValueError, match=words):
            make()
