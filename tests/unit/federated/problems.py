"""Linear regressions as clients, and every algorithm on them in numpy, written from the papers' formulas."""

import numpy as np
import torch
from torch import nn

from thinwire.systems import federated as fl

D = 4


def population(count=6, seed=0, sizes=None, d=D):
    """[(A [n, d], y [n])] per client, fp64; sizes differ."""
    draw = np.random.default_rng(seed)
    sizes = sizes or [3 + 2 * i for i in range(count)]
    clients = []
    for n in sizes:
        a = draw.normal(size=(n, d)) * draw.uniform(0.5, 1.5, size=d)
        clients.append((a, a @ draw.normal(size=d) + 0.1 * draw.normal(size=n)))
    return clients


def as_clients(data):
    rows = [(torch.tensor(a), torch.tensor(y)) for a, y in data]
    return fl.FunctionClients(len(rows), rows.__getitem__, lambda i: len(rows[i][1]))


def model(d=D, start=0.3):
    net = nn.Linear(d, 1, bias=False).double()
    nn.init.constant_(net.weight, start)
    return net


def loss(net, batch):
    a, y = batch
    return 0.5 * (net(a).squeeze(1) - y).square().mean()


def gradient(client, x):
    a, y = client
    return a.T @ (a @ x - y) / len(y)


def train(algorithm, data, *, rounds, clients_per_round=None, net=None, **options):
    """Weights after some rounds, as numpy, and the history."""
    net = net or model()
    options.setdefault("reduction", "fp64")
    clients = as_clients(data)
    history = fl.simulate(
        algorithm, net, clients, rounds=rounds, clients_per_round=clients_per_round or len(data), loss=loss, **options
    )
    return net.weight.detach().numpy().reshape(-1).copy(), history


def cohorts(data, rounds, cohort, seed=0):
    from thinwire.systems.federated.data import sample

    return [sample(seed, r, len(data), cohort) for r in range(rounds)]


def start(d=D):
    return np.full(d, 0.3)


def weights_of(data, chosen, uniform=False):
    n = np.array([1.0 if uniform else len(data[i][1]) for i in chosen])
    return n / n.sum()


def sgd(client, x, lr, steps, *, momentum=0.0, adjust=lambda g, x: g):
    v = np.zeros_like(x)
    for _ in range(steps):
        v = momentum * v + adjust(gradient(client, x), x)
        x = x - lr * v
    return x


def fedavg(data, plan, lr, steps, *, server_lr=1.0, mu=0.0, uniform=False, momentum=0.0):
    theta = start()
    for chosen in plan:
        ends = [
            sgd(data[i], theta, lr, steps(i), momentum=momentum, adjust=lambda g, x, t=theta: g + mu * (x - t))
            for i in chosen
        ]
        w = weights_of(data, chosen, uniform)
        theta = theta + server_lr * sum(wi * (x - theta) for wi, x in zip(w, ends))
    return theta


def fedopt(data, plan, lr, steps, rule, *, server_lr, b1=0.9, b2=0.99, tau=1e-3):
    theta, m, v = start(), np.zeros(D), np.full(D, tau**2)
    for chosen in plan:
        w = weights_of(data, chosen)
        d = sum(wi * (sgd(data[i], theta, lr, steps(i)) - theta) for wi, i in zip(w, chosen))
        m = b1 * m + (1 - b1) * d
        v = {"adagrad": v + d**2, "adam": b2 * v + (1 - b2) * d**2, "yogi": v - (1 - b2) * d**2 * np.sign(v - d**2)}[
            rule
        ]
        theta = theta + server_lr * m / (np.sqrt(v) + tau)
    return theta


def fednova(data, plan, lr, steps, *, momentum=0.0, mu=0.0):
    """By the definition: a is the L1 norm of the weights with which gradients enter the change."""

    def norm(tau):
        weights, v = np.zeros(tau), np.zeros(tau)
        for k in range(tau):  # coefficients of gradient 0..k in the velocity, then in x; the pull shrinks what was done
            v *= momentum
            v[k] += 1
            weights = weights * (1 - lr * mu) + v
        return np.abs(weights).sum()

    theta = start()
    for chosen in plan:
        w = weights_of(data, chosen)
        pull = lambda g, x, t=theta: g + mu * (x - t)  # noqa: E731
        ends = [sgd(data[i], theta, lr, steps(i), momentum=momentum, adjust=pull) for i in chosen]
        norms = [norm(steps(i)) for i in chosen]
        direction = sum(wi * (x - theta) / a for wi, x, a in zip(w, ends, norms))
        theta = theta + sum(wi * a for wi, a in zip(w, norms)) * direction
    return theta


def mime(data, plan, lr, steps, b, *, lite=False):
    theta, s = start(), np.zeros(D)
    for chosen in plan:
        w = weights_of(data, chosen)
        c = sum(wi * gradient(data[i], theta) for wi, i in zip(w, chosen))
        ends = []
        for i in chosen:
            x = theta
            for _ in range(steps(i)):
                g = gradient(data[i], x) + (0 if lite else c - gradient(data[i], theta))
                x = x - lr * ((1 - b) * g + b * s)
            ends.append(x)
        theta, s = sum(wi * x for wi, x in zip(w, ends)), (1 - b) * c + b * s
    return theta


def scaffold(data, plan, lr, steps, *, server_lr=1.0):
    theta, c, own = start(), np.zeros(D), {}
    for chosen in plan:
        moves, changes = [], []
        for i in chosen:
            mine = own.get(i, np.zeros(D))
            x = sgd(data[i], theta, lr, steps(i), adjust=lambda g, x, m=mine, c=c: g - m + c)
            new = mine - c + (theta - x) / (steps(i) * lr)
            moves.append(x - theta)
            changes.append(new - mine)
            own[i] = new
        theta = theta + server_lr * sum(moves) / len(chosen)
        c = c + sum(changes) / len(data)
    return theta


def feddyn(data, plan, lr, steps, alpha):
    theta, h, own = start(), np.zeros(D), {}
    for chosen in plan:
        ends = []
        for i in chosen:
            mine = own.get(i, np.zeros(D))
            x = sgd(data[i], theta, lr, steps(i), adjust=lambda g, x, m=mine, t=theta: g - m + alpha * (x - t))
            own[i] = mine - alpha * (x - theta)
            ends.append(x)
        h = h - alpha / len(data) * sum(x - theta for x in ends)
        theta = sum(ends) / len(chosen) - h / alpha
    return theta
