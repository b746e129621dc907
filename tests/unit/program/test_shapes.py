"""Shapes that a trace finds without torch are torch's own."""

import operator

import pytest
import torch

from thinwire.core.methods.registry import classes, needed
from thinwire.core.program import Topology
from thinwire.core.program import trace as traces
from thinwire.core.program.trace import ShapesAlone, trace


def made(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype, device="meta")


CASES = {
    "cat": lambda: torch.cat([made(2, 3), made(2, 4)], dim=1),
    "cat of two dtypes": lambda: torch.cat([made(2), made(3, dtype=torch.float64)]),
    "cat from behind": lambda: torch.cat([made(2, 3), made(2, 4)], -1),
    "stack": lambda: torch.stack([made(2, 3)] * 4),
    "where": lambda: torch.where(made(5, dtype=torch.bool), -1, made(5, dtype=torch.int64)),
    "where with a number": lambda: torch.where(made(dtype=torch.bool), made(5), torch.nan),
    "where that broadcasts": lambda: torch.where(made(4, 1, dtype=torch.bool), made(5), 0.0),
    "arange": lambda: torch.arange(7, device="meta"),
    "arange from": lambda: torch.arange(2, 7, device="meta"),
    "zeros": lambda: torch.zeros((2, 3), dtype=torch.float64, device=torch.device("meta")),
    "zeros of a number": lambda: torch.zeros(3, device="meta"),
    "index": lambda: made(6, 2)[made(4, dtype=torch.int64)],
    "slice": lambda: made(6, 2)[1:3],
    "mask": lambda: made(8, dtype=torch.int64) >> 2,
    "minus": lambda: -made(3, 2),
    "times": lambda: made(3, dtype=torch.uint8) * 4,
    "times a fraction": lambda: made(3, dtype=torch.int64) * 0.5,
    "flags times": lambda: made(3, dtype=torch.bool) * 4,
    "compared": lambda: made(3) >= 0,
    "compared with a tensor": lambda: operator.lt(made(3, 1), made(4)),
    "divided": lambda: made(3, 2).div_(2),
    "not on meta": lambda: torch.cat([torch.ones(2), -torch.ones(3)]),
}


@pytest.mark.parametrize("case", CASES)
def test_an_operation_has_the_shape_and_dtype_that_torch_gives_it(case):
    known = CASES[case]()
    with ShapesAlone():
        found = CASES[case]()
    assert (found.shape, found.dtype, found.device) == (known.shape, known.dtype, known.device)


@pytest.mark.parametrize("name", [name for name, cls in classes().items() if not needed(cls)])
def test_a_trace_is_the_same_without(name, monkeypatch):
    method, topology = classes()[name](), Topology(4, 2)
    shapes = [("a", (300, 40)), ("b", (40,)), ("c", (17, 3, 3))]

    def traced():
        return [trace(method, shapes, topology, rank=rank, step=step) for rank in (0, 1) for step in (0, 1, 5)]

    found = traced()
    monkeypatch.setattr(traces, "ShapesAlone", lambda: torch.no_grad())
    assert traced() == found
