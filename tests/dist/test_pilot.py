"""Plans made while training goes on: measured merges, auto, adaptive. The same on all ranks, and harmless."""

import json

import cases
import pytest
import torch

import thinwire as tw
from spawned import run
from thinwire.core.pricing.costs import Costs, Linear
from thinwire.engine.controller import pilot

pytestmark = pytest.mark.dist

SLOW = Costs.of_link(100e6, 200e-6, 2)
SLOWEST = Costs.of_link(1e6, 200e-6, 2)  # what is sent decides, however long a busy machine computes
FREE = Costs.of_link(1e15, 0.0, 2, node_bits_per_second=1e15, node_latency_seconds=0.0)


def _train(rank, method, options, costs, steps=14, **attach):
    net = cases.model(width=64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    sync = tw.attach(net, optimizer, method, detect_desync=True, costs=costs, **attach, **options)
    first = sync.plan.hash
    for step in range(steps):
        cases.down(cases.loss_of(net, rank, step, width=64), optimizer)
    return net, sync, first


MEASURED = [
    ("ssgd", {"fusion": "optimal"}),
    ("ssgd", {"fusion": "mgwfbp"}),
    ("omgs", {"density": 0.1}),
    ("omgs", {"density": 0.1, "fusion": "omgs"}),
    ("lags", {"max_ratio": 50}),
    ("acp", {"rank": 2, "fusion": "optimal"}),
]


def _measured(rank, size):
    found = []
    for method, options in MEASURED:
        net, sync, _first = _train(rank, method, options, SLOW)
        kept = [b.kept for b in sync.plan.phases[0]]
        found.append((method, sync.plan.hash, sync.plan.rule, len(sync.plan.phases[0]), kept, cases.weights(net)))
        sync.close()
    return found


def test_measured_plans_are_the_same_on_all_ranks():
    for rows in zip(*run(_measured, 2, seconds=250)):
        (method, plan, rule, _, kept, weights), *others = rows
        assert "measured" in rule, method
        for other in others:
            assert other[1] == plan
            assert all(torch.equal(a, b) for a, b in zip(weights, other[5]))
        if method == "lags":
            assert any(kept)


def _lags(rank, size):
    """Where the network is free every layer goes dense, and nothing is owed any more."""
    net, sync, _ = _train(rank, "lags", {"max_ratio": 50, "exposed_seconds": 1.0}, FREE, steps=20)
    dense = [b.kept for b in sync.plan.phases[0] if not b.dense]
    sizes = [p.numel() for p in reversed(list(net.parameters())) if p.dim() > 1]
    return dense, sizes, max(float(r.abs().max()) for r in sync.services.state.residuals.values())


def test_lags_goes_dense_where_the_network_is_free():
    for kept, sizes, owed in run(_lags, 2):
        assert kept == sizes
        assert owed == 0


def _residuals(rank, size):
    """A plan that is made anew leaves residuals as they are."""
    net, sync, _ = _train(rank, "topk", {"density": 0.05, "fusion": "optimal"}, SLOW, steps=10)
    before = {n: r.clone() for n, r in sync.services.state.residuals.items()}
    sync.adopt_plan(tw.Plan.of([[n for n, _ in net.named_parameters()]]))
    return all(torch.equal(before[n], r) for n, r in sync.services.state.residuals.items()), bool(before)


def test_a_new_plan_keeps_residuals():
    assert run(_residuals, 2) == [(True, True)] * 2


def _auto(rank, size):
    found = []
    for costs, lossy in [(SLOWEST, False), (SLOWEST, True), (FREE, True)]:
        _, sync, _ = _train(rank, "auto", {}, costs, lossy=lossy)
        found.append((sync.services.method.name, sync.plan.hash, sync.stats().why, sync.stats().bytes_sent))
        sync.close()
    return found


def test_auto_chooses_alike_and_says_why():
    results = run(_auto, 2)
    assert [row[:3] for row in results[0]] == [row[:3] for row in results[1]]
    exact, lossy, free = results[0]
    assert exact[0] == "ssgd"
    assert lossy[0] != "ssgd"
    assert free[0] == "ssgd"
    assert len(exact[2]) == 3
    assert "auto: ssgd" in exact[2][0]
    assert "lossy" in exact[2][1]
    assert 'attach(model, optimizer, "local") would be faster' in exact[2][2]


RACED = {"method": "topk", "options": {"density": 0.001}, "every": 1, "delay": 0, "elements": 10_000,
         "workers": 2, "factors": [1.1, 1.2]}  # fmt: skip


def _by_a_race(rank, size, path):
    _, sync, _ = _train(rank, "auto", {}, SLOWEST, lossy=True, worth=path)
    return sync.services.method.name, sync.stats().why[0]


def test_auto_goes_by_what_a_race_has_found(tmp_path):
    """Only what was raced may be chosen: of Top-k the shipped table says that it does not pay."""
    (tmp_path / "race.json").write_text(json.dumps({"rows": [RACED]}))
    for name, why in run(_by_a_race, 2, str(tmp_path / "race.json")):
        assert name == "topk"
        assert "x 1.20 steps (your race with 0.01 M parameters, 2 workers)" in why


def _while_it_measures(rank, size, path):
    """What has been sent when the choice is made, and how."""
    found = []
    exact, brief = (
        1 + pilot.SETTLE_STEPS + pilot.PROFILE_STEPS,
        1 + pilot.LOSSY_SETTLE_STEPS + pilot.LOSSY_PROFILE_STEPS,
    )
    lossy = {"lossy": True, "worth": path}
    for steps, options in [(exact, {}), (brief, lossy), (brief, lossy | {"start_compression_step": 2})]:
        _, sync, _ = _train(rank, "auto", {}, SLOWEST, steps=steps - 1, **options)
        early = sync.stats().method, sync.stats().settled
        assert sync.state_dict()["method"] == "ssgd"  # not what measures
        sync.close()
        _, sync, _ = _train(rank, "auto", {}, SLOWEST, steps=steps, **options)
        stats = sync.stats()
        found.append((early, stats.settled, stats.method, stats.bytes_sent / stats.dense_bytes, set(stats.collectives)))
        sync.close()
    return found


def test_a_lossy_auto_measures_in_five_steps_of_8_bits(tmp_path):
    """An exact one in eleven exact steps; so does who asks for exact steps, in five."""
    (tmp_path / "race.json").write_text(json.dumps({"rows": [RACED]}))
    for exact, lossy, asked in run(_while_it_measures, 2, str(tmp_path / "race.json")):
        assert exact == (("ssgd", False), True, "ssgd", 1.0, {"AllReduce"})
        assert lossy[:3] == (("8-bit start", False), True, "topk")
        assert asked[:3] == (("ssgd", False), True, "topk")
        assert lossy[4] == {"AllGather"}
        assert lossy[3] < 0.27  # scales are the rest
        assert asked[3:] == (1.0, {"AllReduce"})
    assert 1 + pilot.LOSSY_SETTLE_STEPS + pilot.LOSSY_PROFILE_STEPS == 5


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"method": "ssgd", "worth": "race.json"}, "worth= is for attach"),
        ({"method": "auto", "worth": "race.json"}, "worth= is for attach"),
        ({"method": "local", "worth": "race.json"}, "leave out plan, bucket_cap_mb, costs, worth and lossy"),
        ({"method": "auto", "lossy": True, "worth": "none.json"}, "none.json cannot be read: No such file"),
        ({"method": "auto", "lossy": True, "worth": __file__}, "holds no table of steps to a loss"),
    ],
)
def test_worth_is_for_auto_and_a_file_of_a_race(options, says):
    net = cases.model()
    with pytest.raises(ValueError, match=says):
        tw.attach(net, torch.optim.SGD(net.parameters(), lr=0.05), **options)


def _probed(rank, size):
    """Nothing is given: the network is measured."""
    _, sync, _ = _train(rank, "auto", {}, None)
    return sync.stats().why, sync.services.controller.costs.hash, sync.plan.hash


def test_auto_measures_the_network():
    a, b = run(_probed, 2)
    assert a == b
    assert a[0][-1].startswith("prices: measured in ")


def _adaptive(rank, size):
    """A prediction that is far off is noticed: planned again with "adaptive", else said once."""
    pilot.WATCH_STEPS = 12
    wrong = Costs({("AllReduce", "world", 2): Linear(30.0, 0.0)}, SLOW.compute)
    _, sync, _first = _train(rank, "ssgd", {}, wrong, steps=60, plan="adaptive")
    again = sync.services.controller.decisions
    sync.close()
    _, sync, _ = _train(rank, "ssgd", {"fusion": "optimal"}, wrong, steps=60)
    return again, sync.services.controller.decisions, sync.services.controller.warned


def test_a_wrong_prediction_is_noticed():
    for again, once, warned in run(_adaptive, 2):
        assert again >= 2
        assert once == 1
        assert warned
