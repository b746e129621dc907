"""The threshold kept between steps (sparsified.md, test 10)."""

import pytest
import torch
from scipy.stats import chisquare
from selections import laplace, seeded, static_shapes, vectors

from thinwire.kernels.select.reuse import Controller, find, reuse

DRAWS = {"normal": lambda d, seed: torch.randn(d, generator=seeded(seed)), "laplace": laplace}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("feedback", [False, True])
def test_the_count_stays_near_k(name, feedback):
    """50 steps on fresh gradients, with and without what was not sent."""
    d, k, control = 50_000, 500, Controller()
    room = control.capacity(d, k)
    threshold, residual, errors = torch.tensor(0.0), torch.zeros(d), []
    for step in range(51):
        a = DRAWS[name](d, step) + residual
        if control.exact_step(step):
            values, indices, threshold = find(a, k, room)
            count = (indices >= 0).sum()
        else:
            values, indices, count = reuse(a, threshold, room, seeded(step))
            threshold = control.next(threshold, count, k)
        errors.append(abs(int(count) - k) / k)
        if feedback:
            residual = a.index_add(0, indices.clamp(min=0), -values)
            sent = indices[indices >= 0]
            assert not residual[sent].any()
            assert torch.equal(residual.abs() + residual.new_zeros(d).index_add(0, sent, values[: sent.numel()]).abs(),
                               a.abs())  # fmt: skip
    assert errors[50] <= 0.34


def test_a_wrong_threshold_finds_back():
    """A change of scale by 30 % is made good before the next exact step."""
    d, k, control = 50_000, 500, Controller()
    room = control.capacity(d, k)
    x = torch.randn(d, generator=seeded())
    for factor in (0.8, 1.25):
        threshold = find(x, k, room)[2] * factor
        for step in range(1, control.every):
            _, _, count = reuse(x, threshold, room, seeded(step))
            threshold = control.next(threshold, count, k)
        assert 2 / 3 * k <= int(count) <= 5 / 4 * k


def test_both_texts_agree_on_every_vector():
    for d in (1, 7, 1025):
        for _, x in vectors(d):
            for quantile in (0.0, 0.5, 0.9, 1.0):
                threshold = x.abs().quantile(quantile)
                k = max(1, d // 10)
                room = Controller().capacity(d, k)
                values, indices, count = reuse(x, threshold, room, seeded(d))
                assert int(count) == int((x.abs() >= threshold).sum())
                sent = indices[indices >= 0]
                assert sent.numel() == sent.unique().numel() == min(int(count), room)
                assert torch.equal(values[: sent.numel()], x[sent])
                assert not values[sent.numel() :].any()
                with static_shapes():
                    other, places, counted = reuse(x, threshold, room, seeded(d))
                assert torch.equal(places.sort().values, indices.sort().values)
                assert torch.equal(other[places.argsort()], values[indices.argsort()])
                assert int(counted) == int(count)


def test_overflow_is_shared_out_and_nan_is_seen():
    x, counts = torch.ones(200), torch.zeros(200, dtype=torch.int64)
    generator = seeded(2)
    for _ in range(4000):
        _, indices, count = reuse(x, torch.tensor(0.5), 25, generator)
        counts[indices] += 1
    assert int(count) == 200
    assert chisquare(counts).pvalue > 0.001
    x[7] = torch.inf
    missed = 0
    for seed in range(5):
        values, indices, _ = reuse(x, torch.tensor(0.5), 25, seeded(seed))
        assert values.isnan().all()
        missed += 7 not in indices.tolist()
    assert missed  # it need not be in the window


def test_meta_and_controller():
    meta = torch.empty(100, device="meta")
    assert [t.shape for t in reuse(meta, meta[0], 13)] == [(13,), (13,), ()]
    assert [t.shape for t in find(meta, 10, 13)] == [(13,), (13,), ()]
    control = Controller()
    assert [control.exact_step(step) for step in (0, 1, 31, 32)] == [True, False, False, True]
    assert [control.capacity(100, 10), control.capacity(11, 10)] == [13, 11]
    one = torch.tensor(1.0)
    for count, want in ((66, 1 / 1.012), (67, 1.0), (125, 1.0), (126, 1.012)):
        assert float(control.next(one, torch.tensor(count), 100)) == pytest.approx(want)
