import math
import random

import pytest
from random_nets import log_uniform, net, sort_seconds

from thinwire.core.pricing.ratios import lags

BANDWIDTHS = (1e7, 1e8, 1e9, 1e10, 1e11, 1e12)  # bytes per second


def prices(rate, start_up=1e-4, workers=8):
    gather = lambda k: (workers - 1) * (start_up + 8 * k / rate)  # noqa: E731
    reduce = lambda d: 2 * (workers - 1) * (start_up + 4 * d / workers / rate)  # noqa: E731
    return gather, reduce


def clocks(n, ratios, gather, reduce, select, side_stream, exposed):
    """Each layer's end and deadline, by the clock, and the end at the least count."""
    compute = link = chosen = 0.0
    for i, d in enumerate(n.sizes):
        compute += n.seconds[i]
        hide = n.seconds[i + 1] if i + 1 < len(n.sizes) else exposed
        if ratios.dense[i]:
            link = max(link, compute) + reduce(d) if d else link
            yield i, link, compute + hide, None
            continue
        if side_stream:
            ready = chosen = max(chosen, compute) + select(d)
        else:
            ready = compute = compute + select(d)
        start = max(link, ready)
        link = start + gather(ratios.kept[i])
        yield i, link, compute + hide, start


@pytest.mark.parametrize("side_stream", [False, True])
def test_bounds_deadlines_and_more_bandwidth_never_keeps_less(side_stream):
    draw = random.Random(7)
    for _ in range(150):
        n = net(draw, 1, 12)
        ratio, start_up = draw.choice([1, 10, 1000, 3.7]), log_uniform(draw, 1e-7, 1e-3)
        exposed = draw.choice([0.0, log_uniform(draw, 1e-5, 1e-2)])
        before = None
        for rate in BANDWIDTHS:
            gather, reduce = prices(rate, start_up)
            made = lags(
                n.sizes,
                n.seconds,
                sort_seconds,
                gather,
                reduce,
                ratio,
                exposed_seconds=exposed,
                side_stream=side_stream,
            )
            least = [min(d, max(1, math.ceil(d / ratio))) for d in n.sizes]
            assert all(low <= k <= d for low, k, d in zip(least, made.kept, n.sizes, strict=True))
            assert all(k == d for k, d, dense in zip(made.kept, n.sizes, made.dense, strict=True) if dense)
            for i, ends, deadline, start in clocks(n, made, gather, reduce, sort_seconds, side_stream, exposed):
                if start is None or start + gather(least[i]) <= deadline:
                    assert ends <= deadline or n.sizes[i] == 0
                    if start is not None and made.kept[i] < n.sizes[i]:
                        assert start + gather(made.kept[i] + 1) > deadline
                else:
                    assert made.kept[i] == least[i]
            if before is not None:
                assert all(a <= b for a, b in zip(before, made.kept, strict=True))
            before = made.kept


@pytest.mark.parametrize("side_stream", [False, True])
def test_free_links_are_dense_and_no_budget_keeps_the_least(side_stream):
    draw = random.Random(8)
    for _ in range(100):
        n = net(draw, 1, 20)
        free = lags(n.sizes, n.seconds, lambda d: 0.0, lambda k: 0.0, lambda d: 0.0, side_stream=side_stream)
        assert all(free.dense)
        assert free.kept == n.sizes
        gather, reduce = prices(1e8)
        none = lags(n.sizes, [0.0] * len(n.sizes), sort_seconds, gather, reduce, side_stream=side_stream)
        assert none.kept == [min(d, max(1, math.ceil(d / 1000))) for d in n.sizes]
        assert not any(dense for dense, d in zip(none.dense, n.sizes, strict=True) if d)


def test_exposed_seconds_are_for_the_last_layer():
    gather, reduce = prices(1e8)
    tight = lags([10**6, 10**6], [0.01, 0.01], sort_seconds, gather, reduce)
    loose = lags([10**6, 10**6], [0.01, 0.01], sort_seconds, gather, reduce, exposed_seconds=0.05)
    assert tight.kept[0] == loose.kept[0]
    assert tight.kept[1] < loose.kept[1]
    assert loose.finish_seconds <= 0.02 + sort_seconds(10**6) * 2 + 0.05 + 1e-12
