"""The three arithmetics, and what must not depend on them: devices, schedules, lost devices, failed clients."""

from typing import ClassVar

import numpy as np
import problems as p
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.systems import federated as fl
from thinwire.systems.federated.aggregator import NotLinear, Operator
from thinwire.systems.federated.device import Accumulator

DATA = p.population(count=9)


def summed(mode, values, weights, groups):
    """Add up in groups, then the groups."""
    total = Accumulator(mode)
    for group in groups:
        part = Accumulator(mode)
        for i in group:
            part.add("x", values[i], weights[i])
        total.merge(part)
    return total.result("x", 1.0, torch.float32)


@given(st.lists(st.floats(-1000, 1000, width=32), min_size=2, max_size=12), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_exact_is_exact_in_order_and_close_in_value(values, random):
    tensors = [torch.tensor([v]) for v in values]
    weights = [1 / len(values)] * len(values)
    shuffled = list(range(len(values)))
    random.shuffle(shuffled)
    one = summed("exact", tensors, weights, [range(len(values))])
    two = summed("exact", tensors, weights, [[i] for i in shuffled])
    assert torch.equal(one, two)
    assert float(one) == pytest.approx(sum(values) / len(values), rel=1e-6, abs=len(values) * 2.0**-40)


def test_exact_says_when_it_overflows():
    total = Accumulator("exact")
    for _ in range(5):
        total.add("delta", torch.tensor([1e6, 1.0]), 1.0)
    with pytest.raises(OverflowError, match="'delta' adds up to"):
        total.result("delta", 1.0, torch.float32)
    fine = Accumulator("fp64")
    fine.add("delta", torch.tensor([1e7]), 1.0)
    assert float(fine.result("delta", 1.0, torch.float32)) == 1e7


ALGORITHMS = {
    "fedavg": lambda: fl.FedAvg(lr=0.1, batch_size=4, epochs=2),
    "fedopt": lambda: fl.FedOpt(lr=0.1, batch_size=4, server_lr=0.1),
    "fednova": lambda: fl.FedNova(lr=0.1, batch_size=4),
    "mime": lambda: fl.Mime(lr=0.1, batch_size=4),
    "scaffold": lambda: fl.Scaffold(lr=0.1, batch_size=4),
    "feddyn": lambda: fl.FedDyn(lr=0.1, batch_size=4),
    "compressed": lambda: fl.Compressed(fl.FedAvg(lr=0.1, batch_size=4), "topk", density=0.5),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_result_does_not_depend_on_devices_and_schedule(name):
    """B5, B12: bit for bit in exact mode, though states follow their clients from device to device."""
    make = ALGORITHMS[name]
    options = {"rounds": 4, "clients_per_round": 6, "reduction": "exact"}
    wanted, _ = p.train(make(), DATA, **options)
    slow = [fl.Speed(0.1), fl.Speed(0.5), fl.Speed(0.1)]
    variants = [
        {"devices": 3, "schedule": "equal"},
        {"devices": 3, "schedule": "lpt", "speeds": slow, "warmup_rounds": 1},
        {"devices": 3, "schedule": "pull", "speeds": slow},
        {"devices": 8, "schedule": "auto"},
        {"devices": 3, "schedule": "pull", "speeds": slow, "faults": {(1, 0): 0.3, (2, 2): 0.0}},
        {"devices": 3, "schedule": "lpt", "speeds": slow, "faults": {(0, 1): 0.4}},
    ]
    first = [*ALGORITHMS].index(name)
    for variant in variants if name == "scaffold" else [variants[first % 4], variants[4 + first % 2]]:
        found, history = p.train(make(), DATA, **options, **variant)
        assert np.array_equal(found, wanted), variant
        if "faults" in variant:
            assert any(row.lost_devices for row in history.rounds)
    near, _ = p.train(make(), DATA, rounds=4, clients_per_round=6, reduction="fp64", devices=3)
    np.testing.assert_allclose(near, wanted, rtol=1e-9, atol=1e-9)


def test_traffic_is_a_sum_per_device_whatever_the_number_of_clients():
    """B14."""
    data = p.population(sizes=[4] * 40)
    size = p.D * 8
    for devices in (1, 5):
        for cohort in (5, 40):
            _, history = p.train(
                fl.FedAvg(batch_size=None), data, rounds=1, clients_per_round=cohort, devices=devices, schedule="equal"
            )
            (row,) = history.rounds
            assert row.bytes_up == row.bytes_down == size * devices
            assert row.client_bytes == size * cohort
    _, history = p.train(fl.Mime(batch_size=None), data, rounds=1, clients_per_round=40, devices=3, schedule="equal")
    assert history.rounds[0].bytes_up == 2 * 3 * size  # two visits


class Unreliable(fl.FedAvg):
    """Client 1 raises, client 2 answers with infinity, client 3 with another shape."""

    def train(self, context, payload, state):
        result = super().train(context, payload, state)
        if context.client == 1:
            raise KeyError("gone")
        if context.client == 2:
            result.reduce["delta"][0] = float("inf")
        if context.client == 3:
            return fl.ClientResult({"delta": result.reduce["delta"][:2]})
        return result


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_failed_clients_are_named_and_the_mean_is_over_the_rest(weights):
    """B20; the mass of a failed client is not lost."""
    found, history = p.train(Unreliable(batch_size=None, weights=weights), DATA, rounds=1, devices=2)
    (row,) = history.rounds
    assert sorted(row.failed) == [1, 2, 3]
    assert "KeyError" in row.failed[1]
    assert "not finite" in row.failed[2]
    assert "shape" in row.failed[3]
    rest = [client for i, client in enumerate(DATA) if i not in (1, 2, 3)]
    wanted, _ = p.train(fl.FedAvg(batch_size=None, weights=weights), rest, rounds=1)
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    assert row.clients == len(rest)


def test_nobody_answers():
    class Broken(fl.FedAvg):
        def train(self, context, payload, state):
            raise RuntimeError("no")

    with pytest.raises(
        fl.AllClientsFailed, match="all 9 clients of round 0 failed; client 0, for one: RuntimeError: no"
    ):
        p.train(Broken(), DATA, rounds=1)


def test_a_rule_that_is_not_linear_must_collect():
    class Wrong(fl.FedAvg):
        operators: ClassVar = {"delta": Operator("median", linear=False)}

    with pytest.raises(NotLinear, match="use COLLECT"):
        p.train(Wrong(), DATA, rounds=1)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"clients_per_round": 10}, "clients_per_round=10 must be between 1 and the number of clients, 9"),
        ({"clients_per_round": 0}, "clients_per_round=0"),
        ({"rounds": 0}, "rounds=0"),
        ({"devices": 0}, "devices=0"),
        ({"reduction": "fp16"}, "one of fp32, fp64, exact"),
        ({"schedule": "best"}, "one of auto, equal"),
        ({"backend": "mpi"}, "one of auto, inprocess, ranks"),
        ({"backend": "ranks"}, "needs a process group"),
        ({"speeds": [fl.Speed(1.0)], "devices": 2}, "1 entries for 2 devices"),
        ({"evaluate_every": -1}, "evaluate_every"),
        ({"checkpoint_every": 0}, "checkpoint_every"),
    ],
)
def test_refusals(change, words):
    options = {"rounds": 1, "clients_per_round": 3, **change}
    with pytest.raises(ValueError, match=words):
        fl.simulate(fl.FedAvg(), p.model(), p.as_clients(DATA), loss=p.loss, **options)
