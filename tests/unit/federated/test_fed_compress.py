"""Compressed changes: nothing is lost, bytes are counted, methods that make no sense are refused."""

import numpy as np
import problems as p
import pytest
import torch
from torch import nn

from thinwire.systems import federated as fl

DATA = p.population()
METHODS = {
    "topk": {"density": 0.25},
    "cast": {"dtype": "int8"},
    "powersgd": {"rank": 1, "min_rate": 1.0},
    "acp": {"rank": 1, "min_rate": 1.0},
    "signsgd": {},
    "onebit": {},
    "qsgd": {"bits": 4},
}
FEEDBACK = [name for name in METHODS if name != "qsgd"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(p.D, 12)
        self.outer = nn.Linear(12, 1)

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x.float())))


def net():
    torch.manual_seed(0)
    return Net()


def loss(model, batch):
    a, y = batch
    return 0.5 * (model(a).squeeze(1) - y.float()).square().mean()


class Wanting(fl.FedAvg):
    """Remembers each client's last change."""

    def __post_init__(self):
        super().__post_init__()
        self.wanted = {}

    def train(self, context, payload, state):
        result = super().train(context, payload, state)
        self.wanted[context.client] = result.reduce["delta"].clone()
        return result


class Watching(fl.Compressed):
    """Notes what each client wanted to send, what stood for it, and what it owes."""

    def __init__(self, inner, method, **options):
        super().__init__(inner, method, **options)
        self.seen = []

    def train(self, context, payload, state):
        result = super().train(context, payload, state)
        shapes = dict(zip(context.workspace.names, context.workspace.shapes))

        def owed(rows):  # nothing is owed of tensors that are sent whole
            found = [rows.get(f"compression/delta/residual/{n}", torch.zeros(s)) for n, s in shapes.items()]
            return torch.cat([x.reshape(-1) for x in found])

        change, sent = self.inner.wanted[context.client], result.reduce["delta"].clone()
        self.seen.append((context.client, change, owed(state or {}), sent, owed(result.state), result.sent_bytes))
        return result


@pytest.mark.parametrize("name", FEEDBACK)
def test_what_is_not_sent_is_owed(name):
    algorithm = Watching(Wanting(lr=0.05, batch_size=4), name, **METHODS[name])
    fl.simulate(algorithm, net(), p.as_clients(DATA), rounds=4, clients_per_round=4, loss=loss, devices=2)
    last = {}
    for client, x, before, sent, left, size in algorithm.seen:
        torch.testing.assert_close(x + before, sent + left, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(before, last.get(client, torch.zeros_like(x)))  # its own, of the last time
        last[client] = left
        assert 0 < size < 4 * x.numel()
    assert len(algorithm.seen) == 16
    assert any(left.any() for left in last.values())


def final(algorithm):
    return fl.simulate(algorithm, net(), p.as_clients(DATA), rounds=8, clients_per_round=6, loss=loss)


@pytest.fixture(scope="module")
def plain():
    return final(fl.FedAvg(lr=0.1, batch_size=None))


@pytest.mark.parametrize("name", ["topk", "qsgd"])
def test_it_trains_and_sends_less(name, plain):
    found = final(fl.Compressed(fl.FedAvg(lr=0.1, batch_size=None), name, **METHODS[name]))
    start, end = found.rounds[0].metrics["loss"], found.rounds[-1].metrics["loss"]
    assert end < start - 0.5 * (start - plain.rounds[-1].metrics["loss"])
    assert found.rounds[-1].client_bytes < plain.rounds[-1].client_bytes
    assert found.rounds[-1].bytes_up == plain.rounds[-1].bytes_up  # the device's sum is as large as before


def test_topk_bytes_and_values_are_exact():
    algorithm = Watching(Wanting(lr=0.05, batch_size=None), "topk", density=0.25)
    fl.simulate(algorithm, net(), p.as_clients(DATA), rounds=1, clients_per_round=6, loss=loss)
    assert len(algorithm.seen) == 6
    for _, x, _, sent, _, size in algorithm.seen:
        k = int(0.25 * x.numel())
        assert size == 8 * k  # a value and an index each
        kept = x.abs().topk(k).indices
        wanted = torch.zeros_like(x)
        wanted[kept] = x[kept]
        torch.testing.assert_close(sent, wanted)


def test_density_one_is_no_compression():
    options = {"rounds": 3, "clients_per_round": 4, "reduction": "exact"}
    plain, _ = p.train(fl.Scaffold(lr=0.1, batch_size=4), DATA, **options)
    found, _ = p.train(fl.Compressed(fl.Scaffold(lr=0.1, batch_size=4), "topk", density=1.0), DATA, **options)
    assert np.array_equal(plain, found)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: fl.Compressed(fl.Mime(), "topk", density=0.1), "Mime sends weights, gradients"),
        (lambda: fl.Compressed(fl.FedDyn(), "topk", density=0.1), "FedDyn sends weights"),
        (lambda: fl.Compressed(fl.FedRobust(), "topk", density=0.1), "FedRobust sends"),
        (lambda: fl.Compressed(fl.Compressed(fl.FedAvg(), "signsgd"), "topk", density=0.1), "Compressed sends"),
        (lambda: fl.Compressed(fl.FedAvg(), "dgc"), "use topk"),
        (lambda: fl.Compressed(fl.FedAvg(), "ssgd"), "does not compress"),
        (lambda: fl.Compressed(fl.FedAvg(), "topp"), "unknown method"),
        (lambda: fl.Compressed(fl.FedAvg(), "topk"), "needs density"),
    ],
)
def test_refusals(make, words):
    with pytest.raises(ValueError, match=words):
        make()
