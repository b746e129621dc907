"""Ratios shared out over ranks: the same bits as on one rank, whatever the layers and the ranks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rounding import of_sums
from thinwire.core.program import NODE, WORLD, Topology
from thinwire.core.program.local_world import run_lockstep
from thinwire.systems.optim.norms import Layers, Rule, norms, trust_ratios
from thinwire.systems.optim.pto import TrustRatios, decide, split

RULES = [Rule(0.001, 0.0001), Rule(), Rule(0.02, 0.1, 1e-3, (1e-5, 0.5))]


def blocks_of(counts, seed=0, dtype=torch.float32):
    draw = torch.Generator().manual_seed(seed)
    made = []
    for count, rule in zip(counts, RULES):
        shapes = [tuple(torch.randint(1, 9, (int(n),), generator=draw).tolist()) for n in range(count)]
        pairs = [[torch.randn(s, generator=draw).to(dtype) for s in shapes] for _ in range(2)]
        for pair, i in zip(pairs, (0, count - 1)):
            if count > 1:
                pair[i].zero_()  # zero norms, too
        made.append(Layers(*pairs, rule))
    return made


def together(blocks, size, group, topology, partition):
    """The program on all ranks of a world: their ratios, and the bytes they sent."""
    members = [topology.members(group, rank) for rank in range(size)]
    sizes = [w.numel() for block in blocks for w in block.weights]
    found = [None] * size

    def keep(rank):
        count = len(members[rank])
        program = TrustRatios(split(sizes, count, partition), count, group, torch.device("cpu"))
        found[rank] = yield from program.reduce(blocks, members[rank].index(rank))

    sent = run_lockstep([keep(rank) for rank in range(size)], topology)
    return found, sent


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=3),
    st.integers(1, 6),
    st.sampled_from(["cost", "contiguous"]),
    st.integers(0, 99),
)
def test_equal_to_one_rank_bit_for_bit(counts, size, partition, seed):
    blocks = blocks_of(counts, seed)
    found, _ = together(blocks, size, WORLD, Topology(size), partition)
    for ranks in found:
        for ours, alone in zip(ranks, map(trust_ratios, blocks), strict=True):
            assert torch.equal(ours, alone)
            assert ours.isfinite().all()


def test_shared_inside_unequal_machines():
    blocks = blocks_of([5, 3])
    found, sent = together(blocks, 5, NODE, Topology(5, [3, 1, 1]), "cost")
    for ranks in found:
        assert all(torch.equal(a, b) for a, b in zip(ranks, map(trust_ratios, blocks)))
    assert sent[3] == sent[4] == 0


def test_bytes_are_one_number_per_layer_and_one_of_which_there_are():
    blocks = [Layers([torch.ones(4, 4)] * 12, [torch.ones(4, 4)] * 12)]
    _, sent = together(blocks, 4, WORLD, Topology(4), "cost")
    assert sent == [3 * 4 * 4] * 4  # three layers and one more number, of four bytes, to three others


def test_nobody_reads_what_another_rank_owns():
    blocks = blocks_of([6])
    placement = split([w.numel() for w in blocks[0].weights], 3)
    poisoned = Layers([w.clone() for w in blocks[0].weights], blocks[0].others, blocks[0].rule)
    for i, owner in enumerate(placement.owner):
        if owner != 1:
            poisoned.weights[i].fill_(torch.nan)
    program = TrustRatios(placement, 3, WORLD, torch.device("cpu"))
    message = program.reduce([poisoned], 1).send(None).tensor
    expected = trust_ratios(blocks[0].part(placement.items(1)))
    assert torch.equal(message[: len(expected)], expected)
    assert not message[len(expected) : -1].any()


def test_shapes_alone():
    meta = [Layers([torch.empty(3, 4, device="meta")] * 5, [torch.empty(3, 4, device="meta")] * 5)]
    program = TrustRatios(split([12] * 5, 2), 2, WORLD, torch.device("meta"))
    assert program.reduce(meta, 0).send(None).tensor.shape == (4,)  # and which layers there are


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 5))
def test_chunks_are_neighbours(sizes, workers):
    found = split(sizes, workers, "contiguous")
    assert list(found.owner) == sorted(found.owner)
    counts = [found.owner.count(w) for w in range(workers)]
    assert max(counts) - min(counts) <= 1
    assert found.makespan == max(sum(s for s, o in zip(sizes, found.owner) if o == w) for w in range(workers))
    assert split(sizes, workers).makespan <= sum(sizes)


def test_off_unless_it_pays():
    assert decide(100e-6, {"world": 900e-6})[0] == "off"
    assert decide(11e-3, {"world": 14e-3, "node": 1.5e-3})[0] == "node"
    assert decide(11e-3, {"world": 0.9e-3, "node": 1.5e-3})[0] == "world"
    assert decide(1e-3, {"world": 1e-3})[0] == "off"  # no gain
    assert decide(1.0, {}) == ("off", "there is nobody to share with")
    assert (
        decide(100e-6, {"world": 900e-6})[1] == "all norms take 100 us on each rank; shared out over the world, 900 us"
    )


# --- ratios and norms ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1,), (4096,), (4097,), (3, 1000, 1000), (512, 512, 3, 3), (0, 3)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_norms_have_all_digits(shape, channels_last):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) + 0.5
    if channels_last and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    exact = np.sqrt((x.double().numpy() ** 2).sum())
    assert float(norms([x])[0]) == pytest.approx(exact, rel=of_sums(2, 1.0, torch.float32))
    assert torch.equal(norms([x, torch.ones(3), x])[[0, 2]], norms([x]).repeat(2))


@pytest.mark.parametrize("rule", RULES)
def test_ratios_to_a_millionth(rule):
    draw = torch.Generator().manual_seed(2)
    w, g = (torch.randn(2048, 1000, generator=draw) for _ in range(2))
    wn, gn = (float(x.double().norm()) for x in (w, g))
    expected = rule.coefficient * wn / (gn + rule.decay * wn + rule.eps)
    if rule.clamp:
        expected = min(max(expected, rule.clamp[0]), rule.clamp[1])
    assert float(trust_ratios(Layers([w], [g], rule))[0]) == pytest.approx(expected, rel=1e-6)
