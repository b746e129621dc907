"""The same programs on shapes alone: same collectives, same bytes as LocalWorld counts."""

import pytest
import torch
from worlds import EVERY, PLAN, SHAPES, draw, label

from thinwire.core.program import AllGather, LocalWorld, Method, NextForward, Topology
from thinwire.core.program.trace import trace


@pytest.mark.parametrize("method", EVERY, ids=label)
@pytest.mark.parametrize("size", [2, 5])
def test_bytes_equal_those_of_a_run(method, size):
    world, expected = LocalWorld(size, plan=PLAN), [0] * size
    for step in range(3):
        world.step(method, draw(step, ranks=size, dtype=torch.float32))
        for names in PLAN:
            for rank in range(size):
                steps = trace(method, [(n, SHAPES[n]) for n in names], Topology(size), rank=rank, step=step)
                expected[rank] += sum(s.sent_bytes for s in steps)
    checks = 0 if method.name not in ("acp", "powersgd") else (size - 1) * 8 * compressed(method)
    assert world.bytes_sent() == [sent + checks for sent in expected]


def compressed(method):
    return sum(bool(method.rank_of(shape)) for shape in SHAPES.values())


@pytest.mark.parametrize("method", EVERY, ids=label)
def test_nothing_is_sent_for_nothing(method):
    assert trace(method, [("e", (0, 3)), ("f", (0,))], Topology(4)) == []


class Gather(Method):
    def reduce(self, bucket, state):
        x = yield AllGather(bucket.flat)
        assert x.shape == (3, 6)
        yield NextForward()


def test_next_forward_is_listed():
    steps = trace(Gather(), [("a", (6,))], Topology(3))
    assert [(s.kind, s.message_bytes, s.sent_bytes) for s in steps] == [("AllGather", 24, 48), ("NextForward", 0, 0)]
