import random
import time

import pytest
from random_nets import net, resnet50, sort_seconds

from thinwire.planner.costs import Linear, Table
from thinwire.planner.merge import optimal_dense, optimal_sparse

pytestmark = pytest.mark.slow


def seconds_of(work):
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


@pytest.mark.parametrize("curve", [Linear(9e-4, 7.4e-10), Table(((4096, 1e-3), (2**20, 2e-3), (2**27, 0.1)))])
def test_dense_1000(curve):
    n = net(random.Random(0), 1000, 1000)
    assert seconds_of(lambda: optimal_dense(n.sizes, n.seconds, lambda d: curve(4 * d))) < 1


@pytest.mark.parametrize("side_stream", [False, True])
@pytest.mark.parametrize("count, limit", [(161, 2), (300, 10), (1000, 5)])
@pytest.mark.parametrize("a, b", [(1.6e-3, 1e-8), (1.1e-2, 1.7e-8), (1e-4, 1e-7)])
@pytest.mark.parametrize("pace", [1.0, 0.1])
def test_sparse(count, limit, a, b, pace, side_stream):
    n = resnet50(0.12) if count == 161 else net(random.Random(1), count, count)
    times = [t * pace for t in n.seconds]

    def price(d):
        return 2 * (a + b * 4 * 16 * 0.001 * d)

    took = seconds_of(lambda: optimal_sparse(n.sizes, times, sort_seconds, price, side_stream=side_stream))
    assert took < limit
