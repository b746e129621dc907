"""The three exchanges of Top-k: nothing is lost, bytes as stated, a bad element reaches all, auto is one choice."""

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from worlds import draw, label, mean

from thinwire import GTopK, OkTopk
from thinwire.core.kernels.pairs import by_index, contains, merge_pairs, pack, unpack
from thinwire.core.kernels.select import keep_count, top_k
from thinwire.core.methods.base import accumulate_flat, stage_flat
from thinwire.core.methods.regions import regions
from thinwire.core.methods.sparse import EXCHANGES, assumed_cheapest, deliver, messages, seconds
from thinwire.core.methods.topk import TopK
from thinwire.core.pricing.costs import Costs, assumed_compute
from thinwire.core.pricing.plans import Measured, PlanTensor, make_plan
from thinwire.core.pricing.profiles import ModelProfile, TensorTime
from thinwire.core.program import AllGather, LocalWorld, Plan, PlanBucket, Topology
from thinwire.predict.timeline import simulate

SIZES = (1, 2, 3, 4, 7, 8, 12)
METHODS = [TopK(0.05), GTopK(0.05), OkTopk(0.05), OkTopk(0.05, capacity=1.0), OkTopk(0.3, value_dtype="bf16")]


@dataclass(frozen=True)
class PublishedGTopK(TopK):
    """The published rule: what is in the final list counts as sent, whoever it came from. The tree is run by all."""

    name: ClassVar[str] = "published"

    def reduce(self, bucket, state):
        k = keep_count(bucket.numel, self.density)
        a = accumulate_flat(bucket, state)
        values, index = by_index(*top_k(a, k))
        parts = yield AllGather(pack(values, index))
        lists = [tuple(x[r] for x in unpack(parts, k, a.dtype)) for r in range(state.size)]
        while len(lists) > 1:
            lists = [
                merge_pairs(*lists[i : i + 2])[:2] if i + 1 < len(lists) else lists[i] for i in range(0, len(lists), 2)
            ]
        sums, places = lists[0]
        a[index] = torch.where(contains(places, index), 0, values)
        stage_flat(bucket, state, a)
        deliver(bucket, pack(sums, places)[None], k, sums.dtype, state.size)


def leak(method, size, d=400, steps=8):
    """The largest violation of: residuals after + P applied = residuals before + gradients; heavy tails."""
    world, owed, worst = LocalWorld(size), torch.zeros(d, dtype=torch.float64), 0.0
    common = draw(99, {"w": (d,)})[0]["w"]
    for step in range(steps):
        gradients = [{"w": (g["w"] + common) ** 3} for g in draw(step, {"w": (d,)}, size)]
        out = world.step(method, gradients)
        assert all(torch.equal(o["w"], out[0]["w"]) for o in out)
        before = owed + sum(g["w"] for g in gradients)
        owed = sum(r["w"] for r in world.residuals())
        worst = max(worst, float((owed + size * out[0]["w"] - before).abs().max() / before.abs().max()))
    return worst


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("method", METHODS, ids=label)
def test_nothing_is_lost(method, size):
    assert leak(method, size) < 1e-12


@pytest.mark.parametrize("size", [2, 4, 8, 12])
def test_the_published_rule_leaks_from_four_ranks_on(size):
    assert (leak(PublishedGTopK(0.05), size) > 1e-3) == (size >= 4)


@pytest.mark.parametrize("d", [1, 2, 5, 63, 64, 65, 257])
@pytest.mark.parametrize("method", [GTopK(0.3), OkTopk(0.3), GTopK(1.0), OkTopk(1.0)], ids=label)
def test_small_buckets(method, d):
    assert max(leak(method, size, d, 4) for size in (1, 2, 5, 8)) < 1e-12


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_density_one_is_the_average(exchange, size):
    method, world = TopK(1.0, exchange=exchange), LocalWorld(size)
    for step in range(20):
        gradients = [{"w": (8 * g["w"]).round()} for g in draw(step, {"w": (11, 7)}, size)]
        assert torch.equal(world.step(method, gradients)[-1]["w"], sum(g["w"] for g in gradients) / size)
    assert all((r["w"] == 0).all() for r in world.residuals())
    gradients = draw(0, {"w": (11, 7)}, size)
    torch.testing.assert_close(world.step(method, gradients)[0]["w"], mean(gradients)["w"])


@pytest.mark.parametrize("size", SIZES)
def test_bytes(size):
    d, k = 1000, 50
    sent = {}
    for exchange in EXCHANGES:
        world = LocalWorld(size)
        world.step(TopK(k / d, exchange=exchange), draw(0, {"w": (d,)}, size, torch.float32))
        sent[exchange] = world.bytes_sent()
    assert sent["allgather"] == [(size - 1) * 8 * k] * size
    rounds, half = int(math.log2(size)), 1 << int(math.log2(size))
    folds = [r >= half or r + half < size for r in range(size)]
    assert sent["gtopk"] == [(8 * k * rounds if r < half else 0) + fold * (8 + 9) * k for r, fold in enumerate(folds)]
    cap = min(k, math.ceil(1.5 * k / size))
    assert sent["oktopk"] == [(size - 1) * 16 * cap] * size
    if size > 1:
        assert sent["oktopk"][0] <= 4 * 6 * k * (size - 1) / size + 8 * 2 * size


@pytest.mark.parametrize("d", [1, 5, 64, 1000, 4097])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_regions_share_out_every_element(d, size):
    table = regions(d, size, torch.device("cpu"))
    block = torch.arange(d) // table.block
    assert (table.blocks[table.owner[block], table.place[block]] == block).all()
    counts = torch.bincount(table.owner, minlength=size)
    assert counts.max() - counts.min() <= 1


def test_oktopk_does_not_need_one_owner_to_hold_everything():
    """All large entries in one layer: contiguous regions would overflow, blocks dealt out do not."""
    size, d = 4, 4096
    gradients = draw(0, {"w": (d,)}, size)
    for g in gradients:
        g["w"][: d // 4] *= 100
    world = LocalWorld(size)
    out = world.step(OkTopk(0.1), gradients)[0]["w"]
    assert (out != 0).sum() >= 0.9 * keep_count(d, 0.1)


def test_auto_without_a_measurement_is_one_choice():
    assert all(assumed_cheapest(10**6, 1000, size, "fp32", 1.5) == "allgather" for size in (1, 2, 3, 4))
    assert assumed_cheapest(10**6, 1000, 8, "fp32", 1.5) == "gtopk"
    assert assumed_cheapest(10**8, 10**6, 32, "fp32", 1.5) == "oktopk"
    assert assumed_cheapest(10**8, 10**6, 32, "bf16", 1.5) == "oktopk"
    assert assumed_cheapest(10**6, 1000, 32, "bf16", 1.5) != "gtopk"


@pytest.mark.parametrize("size", [2, 4, 5, 8, 16])
def test_formulas(size):
    a, b, k = 1e-3, 1e-8, 10_000
    costs = Costs.of_link(8 / b, a, size, efficiency=1.0)
    price = {e: seconds(e, k, size, costs, "fp32", 1.5) for e in EXCHANGES}
    rounds, extra = int(math.log2(size)), size & (size - 1) != 0
    cap = min(k, math.ceil(1.5 * k / size))
    assert price["allgather"] == pytest.approx((size - 1) * (a + 8 * k * b))
    assert price["gtopk"] == pytest.approx((rounds + 2 * extra) * (a + 8 * k * b) + extra * k * b)
    assert price["oktopk"] == pytest.approx(2 * (size - 1) * a + (size - 1) * 16 * cap * b)
    assert len(messages("gtopk", k, size, "fp32", 1.5)) == rounds + 2 * extra


def planned(bits, size, method):
    shapes = [(2000, 1000), (64, 64)]
    tensors = tuple(TensorTime(f"t{i}", shape, 1e-3) for i, shape in enumerate(shapes))
    profile, topology = ModelProfile("two", tensors, 0.01), Topology(size)
    costs = Costs.of_link(bits, 1e-3, size, compute=assumed_compute())
    measured = Measured(profile, costs, topology)
    plan = make_plan(method, [PlanTensor(t.name, t.shape) for t in tensors], range(2), (), "gloo", measured)
    return plan, simulate(method, profile, topology, costs, plan=plan)


def test_auto_is_decided_in_the_plan_by_measured_costs():
    method = TopK(0.05, exchange="auto", fusion="none")
    plan, timeline = planned(1e8, 32, method)
    assert [bucket.exchange for bucket in plan.phases[0]] == ["oktopk", "gtopk"]
    assert Plan.from_json(plan.to_json()) == plan
    assert {event.name for event in timeline.events} >= {"AllToAll", "Exchange"}
    for fixed in EXCHANGES:
        assert timeline.step_seconds <= planned(1e8, 32, TopK(0.05, exchange=fixed, fusion="none"))[1].step_seconds
    assert [bucket.exchange for bucket in planned(1e8, 32, TopK(0.05, fusion="none"))[0].phases[0]] == ["", ""]


def test_a_plan_that_has_decided_is_what_runs():
    gradients = draw(3, {"a": (40, 5), "b": (30,)}, 8)
    plan = Plan(((PlanBucket(("a",), exchange="oktopk"), PlanBucket(("b",), exchange="gtopk")),))
    got = LocalWorld(8, plan=plan).step(TopK(0.1, exchange="auto"), gradients)[0]
    assert torch.equal(got["a"], LocalWorld(8).step(OkTopk(0.1), gradients)[0]["a"])
    assert torch.equal(got["b"], LocalWorld(8).step(GTopK(0.1), gradients)[0]["b"])
