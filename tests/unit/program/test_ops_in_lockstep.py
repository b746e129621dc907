"""Every op against its definition, on uneven nodes too, and the message when programs do not fit together."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from thinwire.core.program import (
    CROSS,
    NODE,
    WORLD,
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Exchange,
    LocalWorld,
    Method,
    NextForward,
    OrderError,
    ReduceScatter,
    Topology,
)
from thinwire.core.program.local_world import run_lockstep

LAYOUTS = [(1, None), (3, None), (4, 2), (6, 3), (5, [2, 3]), (6, [1, 3, 2])]


def outcomes(topology, program):
    """Run ``program(rank)`` (a generator that returns something) on all ranks."""
    results = [None] * topology.world_size

    def keep(rank):
        results[rank] = yield from program(rank)

    sent = run_lockstep([keep(rank) for rank in range(topology.world_size)], topology, where="the test")
    return results, sent


def values(topology, *shape):
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(-9, 9, shape, generator=draw).double() for _ in range(topology.world_size)]


@pytest.mark.parametrize("size,layout", LAYOUTS)
@pytest.mark.parametrize("scope", [WORLD, NODE, CROSS])
@pytest.mark.parametrize("kind", [AllReduce, ReduceScatter, AllGather, AllToAll, Broadcast])
def test_ops_mean_what_they_say(size, layout, scope, kind):
    topology = Topology(size, layout)
    groups = [topology.members(scope, rank) for rank in range(size)]
    xs = [torch.arange(len(groups[r]) * 2).double() + 100 * r for r in range(size)]

    def program(rank):
        x = xs[rank].view(len(groups[rank]), 2) if kind is AllToAll else xs[rank].clone()
        return (yield kind(x, scope))

    results, _ = outcomes(topology, program)
    for rank, group in enumerate(groups):
        place = group.index(rank)
        total = sum(xs[r] for r in group)
        want = {
            AllReduce: total,
            ReduceScatter: total[2 * place : 2 * place + 2],
            AllGather: torch.stack([xs[r] for r in group]),
            AllToAll: torch.stack([xs[r].view(-1, 2)[place] for r in group]),
            Broadcast: xs[group[0]],
        }[kind]
        assert torch.equal(results[rank], want)


def test_exchange_swaps_and_may_sit_out():
    topology = Topology(5)

    def program(rank):
        peer = None if rank == 4 else rank ^ 1
        first = yield Exchange(torch.tensor([float(rank)]), peer=peer)
        peer = {0: 4, 4: 0}.get(rank)
        second = yield Exchange(torch.tensor([float(rank)]), peer=peer)
        return [first.item(), second.item()]

    results, sent = outcomes(topology, program)
    assert results == [[1, 4], [0, 1], [3, 2], [2, 3], [4, 0]]
    assert sent == [8, 4, 4, 4, 4]


def test_exchange_counts_within_the_group():
    topology = Topology(6, 3)

    def program(rank):
        node = yield Exchange(torch.tensor([rank]), NODE, peer={0: 2, 2: 0}.get(topology.local_rank(rank)))
        cross = yield Exchange(torch.tensor([rank]), CROSS, peer=1 - topology.node_of(rank))
        return [node.item(), cross.item()]

    assert outcomes(topology, program)[0] == [[2, 3], [1, 4], [0, 5], [5, 0], [4, 1], [3, 2]]


def test_groups_go_on_without_each_other_and_next_forward_waits_for_nobody():
    topology = Topology(4, 2)

    def program(rank):
        x = torch.ones(1)
        if rank < 2:
            x = yield AllReduce(x, NODE)
            yield NextForward()
        return (yield AllReduce(x, WORLD)).item()

    assert outcomes(topology, program)[0] == [6.0] * 4


def test_sums_run_in_rank_order_and_in_fp32_for_16_bit():
    xs = [torch.tensor([256.0]), torch.tensor([1.0]), torch.tensor([1.0])]
    topology = Topology(3)

    def program(rank):
        return (yield AllReduce(xs[rank].bfloat16())).item()

    assert outcomes(topology, program)[0] == [258.0] * 3  # bf16 sums would stay at 256


@pytest.mark.parametrize(
    "other,words",
    [
        (lambda: AllReduce(torch.zeros(3)), "rank 1: AllReduce of 3 x torch.float32 in world"),
        (lambda: AllReduce(torch.zeros(2).double()), "rank 1: AllReduce of 2 x torch.float64 in world"),
        (lambda: AllGather(torch.zeros(2)), "rank 1: AllGather of 2"),
        (lambda: AllReduce(torch.zeros(2), CROSS), "rank 1: AllReduce of 2 x torch.float32 in cross"),
        (lambda: Exchange(torch.zeros(2), peer=0), "rank 1: Exchange with 0 of 2"),
        (None, "rank 1: has ended"),
    ],
)
def test_programs_that_do_not_fit_are_listed(other, words):
    def program(rank):
        if rank != 1:
            yield AllReduce(torch.zeros(2))
        elif other is not None:
            yield other()

    with pytest.raises(OrderError) as error:
        outcomes(Topology(2), program)
    assert words in str(error.value)
    assert "the test" in str(error.value)
    assert "rank 0: AllReduce of 2 x torch.float32 in world" in str(error.value)


def test_bad_sizes_are_refused():
    def scatter(rank):
        yield ReduceScatter(torch.zeros(3))

    def chunks(rank):
        yield AllToAll(torch.zeros(3, 1))

    def self_exchange(rank):
        yield Exchange(torch.zeros(1), peer=rank)

    for program, kind in ((scatter, ValueError), (chunks, ValueError), (self_exchange, OrderError)):
        with pytest.raises(kind):
            outcomes(Topology(2), program)


@dataclass(frozen=True)
class Broken(Method):
    """Stages state, then fails."""

    fusion: Any = "auto"

    def reduce(self, bucket, state):
        state.stage(bucket.slots[0].name, residual=torch.ones(1))
        if state.rank == 0:
            yield AllReduce(bucket.flat)


def test_a_failed_step_leaves_no_trace():
    world = LocalWorld(2)
    with pytest.raises(OrderError, match=r"bucket 0 \(w\)"):
        world.step(Broken(), [{"w": torch.zeros(1)}] * 2)
    assert world.residuals() == [{}, {}]
    assert world.states[0].step == 0
