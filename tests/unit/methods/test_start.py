"""The steps before a method begins: 8 bits without a memory, or exact where a method or the user asks for it."""

import pytest
import torch
from worlds import draw, mean

from thinwire import DGC, Cast, Topology, method
from thinwire.core.methods.ssgd import SSGD
from thinwire.core.methods.start import EightBits, exact_method, measuring_method, start_method
from thinwire.core.program import LocalWorld


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("scale", [None, 1024.0])
def test_eight_bits_are_the_first_step_of_int8_every_time(ranks, scale):
    world = LocalWorld(ranks)
    for step in range(3):
        gradients = draw(step, {"w": (23, 29), "b": (7,)}, ranks)
        fresh = LocalWorld(ranks)
        assert fresh.states[0].residuals == {} == world.states[0].residuals
        for ours, theirs in zip(world.step(EightBits(), gradients), fresh.step(Cast("int8"), gradients)):
            for name in ours:
                assert torch.equal(ours[name], theirs[name])
        worst = max(
            float((a[n] - mean(gradients)[n]).abs().max()) for a in world.step(EightBits(), gradients) for n in a
        )
        largest = max(float(g[n].abs().max()) for g in gradients for n in g)
        assert worst <= 2 * largest / 254 * 1.001


def test_an_element_that_is_not_finite_is_not_finite_on_all_ranks():
    gradients = draw(0, {"w": (40,)}, 3)
    gradients[1]["w"][7] = float("inf")
    world = LocalWorld(3)
    for rank in world.step(EightBits(), gradients):
        assert not torch.isfinite(rank["w"]).any()


LOW_RANK = method("powersgd", rank=2)


@pytest.mark.parametrize(
    ("chosen", "topology", "asked", "rounded"),
    [
        (LOW_RANK, Topology(4), None, True),
        (method("topk", density=0.1), Topology(2), None, True),
        (LOW_RANK, Topology(4), 2, False),
        (LOW_RANK, Topology(4, 2), None, False),
        (method("powersgd", rank=2, error_feedback=False), Topology(4), None, False),
        (method("acp", rank=2, deterministic=True), Topology(4), None, False),
        (method("acp", rank=2, decoupled=True), Topology(4), None, False),
        (DGC(density=0.1), Topology(4), None, False),
        (SSGD(), Topology(4), None, False),
    ],
)
def test_who_begins_in_eight_bits(chosen, topology, asked, rounded):
    first = start_method(chosen, topology, asked)
    assert isinstance(first, EightBits) == rounded
    assert rounded or first == exact_method(chosen)


def test_auto_measures_in_eight_bits_where_it_may_and_sums_need_not_go_by_way_of_machines():
    assert measuring_method(Topology(4), None) == EightBits()
    assert measuring_method(Topology(4), 0) == EightBits()
    assert measuring_method(Topology(4), 2) == measuring_method(Topology(4, 2), None) == SSGD()
