"""Each algorithm against its formula in numpy, with partial cohorts."""

import numpy as np
import problems as p
import pytest

from thinwire.systems import federated as fl

DATA = p.population()
ROUNDS, COHORT = 5, 4
PLAN = p.cohorts(DATA, ROUNDS, COHORT)


def steps(i):
    return 3


def close(a, b, tolerance=1e-12):
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


CASES = {
    "fedavg": (fl.FedAvg, {}, lambda: p.fedavg(DATA, PLAN, 0.1, steps)),
    "fedavg, uniform, server rate": (
        fl.FedAvg,
        {"weights": "uniform", "server_lr": 0.5},
        lambda: p.fedavg(DATA, PLAN, 0.1, steps, uniform=True, server_lr=0.5),
    ),
    "fedavg, momentum": (fl.FedAvg, {"momentum": 0.8}, lambda: p.fedavg(DATA, PLAN, 0.1, steps, momentum=0.8)),
    "fedprox": (fl.FedProx, {"mu": 0.7}, lambda: p.fedavg(DATA, PLAN, 0.1, steps, mu=0.7)),
    **{
        rule: (
            fl.FedOpt,
            {"rule": rule, "server_lr": 0.3},
            lambda rule=rule: p.fedopt(DATA, PLAN, 0.1, steps, rule, server_lr=0.3),
        )
        for rule in ("adam", "yogi", "adagrad")
    },
    "sgd server": (fl.FedOpt, {"rule": "sgd"}, lambda: p.fedavg(DATA, PLAN, 0.1, steps)),
    "fednova": (fl.FedNova, {}, lambda: p.fedavg(DATA, PLAN, 0.1, steps)),
    "fednova, momentum": (fl.FedNova, {"momentum": 0.6}, lambda: p.fednova(DATA, PLAN, 0.1, steps, momentum=0.6)),
    "fednova, pull": (fl.FedNova, {"mu": 0.6}, lambda: p.fednova(DATA, PLAN, 0.1, steps, mu=0.6)),
    "mime": (fl.Mime, {"beta": 0.6}, lambda: p.mime(DATA, PLAN, 0.1, steps, 0.6)),
    "mime lite": (fl.Mime, {"beta": 0.6, "lite": True}, lambda: p.mime(DATA, PLAN, 0.1, steps, 0.6, lite=True)),
    "scaffold": (fl.Scaffold, {"server_lr": 0.8}, lambda: p.scaffold(DATA, PLAN, 0.1, steps, server_lr=0.8)),
    "feddyn": (fl.FedDyn, {"alpha": 0.4}, lambda: p.feddyn(DATA, PLAN, 0.1, steps, 0.4)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_formula(case):
    cls, options, wanted = case
    algorithm = cls(lr=0.1, epochs=3, batch_size=None, **options)
    found, history = p.train(algorithm, DATA, rounds=ROUNDS, clients_per_round=COHORT)
    close(found, wanted())
    assert all(row.clients == COHORT and not row.failed for row in history.rounds)


def test_fednova_with_different_numbers_of_steps():
    found, _ = p.train(
        fl.FedNova(lr=0.1, epochs=1, batch_size=4, momentum=0.5), EVEN, rounds=4, clients_per_round=COHORT
    )
    wanted = p.fednova(EVEN, p.cohorts(EVEN, 4, COHORT), 0.1, lambda i: EVEN_STEPS[i], momentum=0.5)
    close(found, wanted)
    assert len(set(EVEN_STEPS)) > 1


# Batches that do not depend on the order: every batch of a client holds the same samples.
EVEN_STEPS = [1, 2, 3, 4, 5, 2]
EVEN = [
    (np.concatenate([a[:4]] * k), np.concatenate([y[:4]] * k))
    for (a, y), k in zip(p.population(sizes=[4] * 6, seed=3), EVEN_STEPS)
]
for i, (a, y) in enumerate(EVEN):  # one row repeated: each batch of 4 is the same
    EVEN[i] = (np.repeat(a[:1], len(y), axis=0), np.repeat(y[:1], len(y)))


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: fl.FedAvg(lr=0.0), "lr=0.0 must be a finite number and above 0"),
        (lambda: fl.FedAvg(epochs=0), "epochs=0"),
        (lambda: fl.FedAvg(batch_size=1.5), "batch_size=1.5"),
        (lambda: fl.FedAvg(momentum=1.0), "momentum"),
        (lambda: fl.FedAvg(weights="equal"), "one of samples, uniform"),
        (lambda: fl.FedProx(mu=-1), "mu"),
        (lambda: fl.FedOpt(rule="lion"), "one of adam, yogi"),
        (lambda: fl.FedOpt(beta1=1.0), "beta1"),
        (lambda: fl.FedNova(mu=0.1, momentum=0.9), "leave one of them out"),
        (lambda: fl.Mime(momentum=0.9), "use beta="),
        (lambda: fl.Mime(max_grad_norm=1.0), "leave max_grad_norm= out"),
        (lambda: fl.Scaffold(momentum=0.9), "plain SGD"),
        (lambda: fl.FedDyn(alpha=0), "alpha"),
        (lambda: fl.FedDyn(server_lr=0.5), "takes no step"),
        (lambda: fl.FedRobust(rule="mode"), "rule='mode' is unknown"),
        (lambda: fl.FedRobust(trim=0.5), "trim=0.5 must be"),
        (lambda: fl.FedRobust(weights="samples"), "leave weights= out"),
    ],
)
def test_bad_options(make, words):
    with pytest.raises(ValueError, match=words):
        make()
