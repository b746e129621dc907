"""The knee, the map, the groups and the assumed devices."""

import json

import pytest
from timelines import profile_of

from thinwire.core.methods.acp import ACP
from thinwire.core.methods.cast import Cast
from thinwire.core.methods.ssgd import SSGD
from thinwire.core.methods.topk import TopK
from thinwire.core.pricing.costs import Costs, assumed_compute
from thinwire.core.pricing.profiles import builtin
from thinwire.core.program import Topology
from thinwire.core.records import plain
from thinwire.predict import choose as planner
from thinwire.predict.choose import DEVICES, Map, explain, knee
from thinwire.predict.choose.worth import UNKNOWN, Worth
from thinwire.predict.timeline import simulate
from thinwire.predict.timeline.local_steps import PLAIN

CANDIDATES = (("ssgd", SSGD()), ("cast", Cast()), ("topk", TopK(0.01)), ("acp", ACP(rank=4)))
RESNET = builtin("resnet50", device_flops=1e13)


def alike(method, elements, workers):
    """As if a lossy step were worth nine tenths of an exact one, and nothing were known of what everybody has."""
    if method in PLAIN.values():
        return UNKNOWN
    return Worth(1.0, 1.0, 1.0, "") if method.exact or method.name == "cast" else Worth(1.0, 10 / 9, 1.2, "a test's")


def choose(*arguments, **options):
    return planner.choose(*arguments, worth=alike, **options)


def map_of(*arguments, **options):
    return planner.map_of(*arguments, worth=alike, **options)


def link(bits, latency=5e-5, per_node=1):
    return lambda topology: Costs.of_link(bits, latency, topology.world_size, per_node)


def efficiency(method, workers, costs, per_node=1):
    alone = RESNET.forward_seconds + sum(RESNET.backward_seconds)
    topology = Topology(workers, per_node)
    return alone / simulate(method, RESNET, topology, costs(topology)).step_seconds


@pytest.mark.parametrize(("method", "bits"), [(SSGD(), 3e9), (ACP(rank=4), 1e10), (SSGD(), 3e10), (ACP(rank=4), 1e11)])
def test_the_knee_is_where_efficiency_falls_below(method, bits):
    found = knee(method, RESNET, link(bits))
    if found is None:
        assert efficiency(method, 4096, link(bits)) >= 0.8
        return
    assert efficiency(method, found, link(bits)) < 0.8
    assert found == 2 or efficiency(method, found - 1, link(bits)) >= 0.8


def test_a_free_network_never_bends():
    costs = Costs.of_link(1e15, 0.0, 8, compute=assumed_compute(1e15, 1e18))
    assert knee(SSGD(), RESNET, costs, shared_compute=False) is None


def test_costs_are_scaled_to_other_numbers_of_workers():
    measured = Costs.of_link(1e11, 5e-5, 8)
    assert knee(SSGD(), RESNET, measured) == knee(SSGD(), RESNET, link(1e11))


def test_machines_are_whole():
    found = knee(SSGD(), RESNET, link(1e11, per_node=8), ranks_per_node=8)
    assert found % 8 == 0
    assert knee(SSGD(), RESNET, link(1e6, per_node=8), ranks_per_node=8, most=16) in (8, 16)
    assert knee(SSGD(), RESNET, link(1e12, 1e-6), most=3) is None


@pytest.mark.parametrize(
    "words", [{"efficiency": 0.0}, {"efficiency": 1.5}, {"ranks_per_node": 0}, {"most": 0}], ids=str
)
def test_wrong_arguments_of_the_knee(words):
    with pytest.raises(ValueError, match=next(iter(words))):
        knee(SSGD(), RESNET, link(1e9), **words)


def prices(bits, topology):
    return Costs.of_link(bits, 5e-5, topology.world_size, topology.layout[0])


def test_the_map_is_choose_cell_by_cell():
    bits, workers, told = (1e8, 1e10, 1e12), (1, 2, 16), []
    found = map_of(
        CANDIDATES, RESNET, bits, workers, costs=prices, on_cell=lambda done, total: told.append((done, total))
    )
    assert told == [(n, 9) for n in range(1, 10)]
    for i, rate in enumerate(bits):
        for j, count in enumerate(workers):
            ranking = choose(CANDIDATES, RESNET, Topology(count), prices(rate, Topology(count)))
            cell = found.cells[i][j]
            assert (cell.winner, cell.winner_exact) == (ranking.best.label, ranking.best_exact.label)
            assert cell.step_seconds == ranking.best.step_seconds
            assert cell.loss_seconds == pytest.approx(ranking.best.step_seconds * ranking.best.steps)
            assert cell.why.startswith(ranking.sentence)
            assert "is bound by" in cell.why
            assert cell.dense_seconds <= ranking.entry("ssgd").step_seconds
    assert {cell.winner for cell in found.cells[0][1:]} <= {"topk", "acp"}
    assert found.cells[2][1].winner == "ssgd"


def test_the_map_as_json():
    found = map_of(CANDIDATES, RESNET, (1e9,), (4, 8), costs=prices, ranks_per_node=4, lossy=False)
    data = json.loads(found.to_json())
    assert data == plain(found)
    assert data["bits_per_second"] == [1e9]
    assert data["workers"] == [4, 8]
    assert data["cells"][0][0]["winner"] == "ssgd"
    assert Map.from_json(found.to_json()) == found
    for text in ("", "{}", '{"bits_per_second": [], "workers": [], "cells": [[{"winner": "a"}]]}'):
        with pytest.raises(ValueError, match="not a thinwire map"):
            Map.from_json(text)
    with pytest.raises(ValueError, match="cannot be placed"):
        map_of(CANDIDATES, RESNET, (1e9,), (6,), costs=prices, ranks_per_node=4)


@pytest.mark.parametrize("method", [SSGD(), TopK(0.01), ACP(rank=4), Cast(fusion="none")], ids=lambda m: m.name)
def test_the_groups_are_those_of_the_timeline(method):
    topology, costs = Topology(16), prices(1e10, Topology(16))
    groups = explain(method, RESNET, topology, costs)
    timeline = simulate(method, RESNET, topology, costs)
    assert round(sum(g.sent_bytes for g in groups) / method.phases) == timeline.bytes_sent
    for phase in range(method.phases):
        mine = [g for g in groups if g.phase == phase]
        assert [g.names for g in mine] == [b.names for b in timeline.plan.phases[phase]]
        assert sum(g.elements for g in mine) == RESNET.elements
        assert [g.ready_seconds for g in mine] == sorted(g.ready_seconds for g in mine)
        assert mine[-1].ready_seconds == pytest.approx(sum(RESNET.backward_seconds))
    links = sum(e.duration_seconds for e in timeline.events if e.lane == "link world")
    assert sum(g.exchange_seconds for g in groups) == pytest.approx(links)


def test_densities():
    groups = explain(TopK(0.01), RESNET, Topology(4), prices(1e10, Topology(4)))
    for group in groups:
        assert (group.kept is None) == group.dense
        if group.kept:
            assert group.kept == int(0.01 * group.elements + 1e-6)
            assert group.density == pytest.approx(0.01, rel=0.01)
            assert group.sent_bytes == 3 * 8 * group.kept
    assert any(group.dense for group in groups)
    assert all(g.density is None for g in explain(SSGD(), RESNET, Topology(4), prices(1e10, Topology(4))))
    assert explain(SSGD(), profile_of([0], [0.1]), Topology(4), prices(1e10, Topology(4)))[0].exchange_seconds == 0


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda d: d.name)
def test_devices_price_every_method_and_are_assumed(device):
    compute = device.compute()
    assert {curve.provenance for curve in compute.values()} == {"assumed"}
    costs = Costs.of_link(1e10, 5e-5, 8, node_bits_per_second=device.node_bits_per_second, compute=compute)
    where = {"backend": device.backend, "shared_compute": device.shared_compute}
    profile = builtin("resnet50", device_flops=device.training_flops)
    assert choose(CANDIDATES, profile, Topology(8), costs, **where).left_out == ()
    assert device.shared_compute == (device.name == "cpu")


def test_faster_devices_come_later():
    rates = [device.training_flops for device in DEVICES.values()]
    assert rates == sorted(rates)
