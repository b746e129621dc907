"""Buffers beside the weights: floats are averaged, counts are not, what is not finite stays out."""

import pytest
import torch

from rounding import of_sums
from thinwire.systems.parameter_server.layout import BufferLayout, Layout, LayoutMismatch, RunningBuffers


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))
        self.register_buffer("cache", torch.ones(5), persistent=False)


def test_a_layout_holds_saved_floats_and_counts_and_comes_back():
    model = Model()
    layout = BufferLayout.of(model)
    assert layout.names == ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")
    assert (layout.numel, layout.floats) == (7, 6)
    flat = torch.arange(7, dtype=torch.float64)
    layout.write(flat, model)
    assert torch.equal(layout.flat(model), flat)
    assert model.norm.num_batches_tracked == 6
    assert model.norm.num_batches_tracked.dtype == torch.int64
    assert BufferLayout.of(torch.nn.Linear(2, 2)).numel == 0


def test_the_layout_of_a_model_tells_its_buffers_too():
    layout = Layout.of(Model())
    assert Layout.from_json(layout.to_json()) == layout
    without = torch.nn.Sequential(torch.nn.BatchNorm1d(3, track_running_stats=False))
    with pytest.raises(LayoutMismatch, match="buffers differ"):
        Layout.of(torch.nn.Sequential(torch.nn.BatchNorm1d(3))).check(Layout.of(without))


def test_the_server_takes_the_first_and_then_moves_a_tenth():
    layout = BufferLayout.of(Model())
    running, model = RunningBuffers(layout), Model()
    running.write(model)  # nothing has come
    assert model.norm.running_var.tolist() == [1.0] * 3
    first = torch.tensor([1.0] * 6 + [4]).double()
    running.add(first)
    before = running.value
    running.add(torch.tensor([11.0] * 6 + [3]).double())
    running.add(torch.full((7,), float("nan"), dtype=torch.float64))
    torch.testing.assert_close(running.value, torch.tensor([2.0] * 6 + [4]).double(), rtol=of_sums(4, 1.0), atol=0)
    assert torch.equal(before, first)  # which may be on its way somewhere


class Odd(torch.nn.Module):
    """Buffers of which each needs a decision of its own."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(2)
        self.register_buffer("mask", torch.full((2,), -torch.inf))
        self.register_buffer("wide", torch.ones(1).expand(3))
        self.register_buffer("sparse", torch.eye(2).to_sparse())
        self.register_buffer("number", torch.tensor(2**60 + 1))


def test_each_buffer_is_decided_alone():
    model = Odd()
    layout = BufferLayout.of(model)
    assert "sparse" not in layout.names

    def named(flat):
        return dict(zip(layout.names, layout.split(flat)))

    rows = [layout.flat(model) for _ in range(3)]
    means, variances, wides = (1.0, 3.0, torch.nan), (4.0, torch.nan, torch.nan), (1.0, 4.0, 1.0)
    for row, mean, var, wide, count in zip(rows, means, variances, wides, (7, 9, 5)):
        values = {"norm.running_mean": mean, "norm.running_var": var, "wide": wide, "norm.num_batches_tracked": count}
        for name, value in values.items():
            named(row)[name].fill_(value)
    mean = layout.mean(rows)
    expected = {
        "norm.running_mean": [2.0] * 2,
        "norm.running_var": [4.0] * 2,
        "wide": [2.0] * 3,
        "norm.num_batches_tracked": [9],  # of counts the largest
        "mask": [-torch.inf] * 2,
    }
    assert {name: named(mean)[name].tolist() for name in expected} == expected
    running = RunningBuffers(layout)
    for flat in (rows[2], mean, rows[2]):
        running.add(flat)
    running.write(model)
    torch.testing.assert_close(model.wide, torch.full((3,), 0.9 * (0.9 + 0.1 * 2) + 0.1))
    assert model.norm.running_mean.tolist() == [2.0, 2.0]
    assert model.norm.running_var.tolist() == [4.0, 4.0]
    assert model.norm.num_batches_tracked == 9
    assert model.mask.tolist() == [-torch.inf] * 2
    assert model.number == 2**60 + 1


def test_bytes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="9 bytes of buffers"):
        BufferLayout.of(Model()).read(torch.zeros(9, dtype=torch.uint8))
