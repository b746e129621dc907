"""The work of an optimal merge: n (n + 1) / 2 runs of layers, each priced once, and few prices more."""

import random

import pytest
from random_nets import net, resnet50, sort_seconds

from thinwire.core.pricing.costs import Linear, Table
from thinwire.core.pricing.optimal import optimal_dense, optimal_sparse

pytestmark = pytest.mark.slow


class Counted:
    def __init__(self, curve):
        self.curve, self.calls = curve, 0

    def __call__(self, elements):
        self.calls += 1
        return self.curve(elements)


@pytest.mark.parametrize("curve", [Linear(9e-4, 7.4e-10), Table(((4096, 1e-3), (2**20, 2e-3), (2**27, 0.1)))])
def test_dense_1000(curve):
    n, price = net(random.Random(0), 1000, 1000), Counted(lambda d: curve(4 * d))
    optimal_dense(n.sizes, n.seconds, price)
    assert price.calls <= 1000 * 1001 / 2 + 1000


@pytest.mark.parametrize(
    ("count", "a", "b", "pace", "side_stream"),
    [
        (161, 1.6e-3, 1e-8, 1.0, False),
        (300, 1.1e-2, 1.7e-8, 0.1, True),
        (1000, 1e-4, 1e-7, 0.1, False),
        (1000, 1.6e-3, 1e-8, 1.0, True),
    ],
)
def test_sparse(count, a, b, pace, side_stream):
    n = resnet50(0.12) if count == 161 else net(random.Random(1), count, count)
    price = Counted(lambda d: 2 * (a + b * 4 * 16 * 0.001 * d))
    optimal_sparse(n.sizes, [t * pace for t in n.seconds], sort_seconds, price, side_stream=side_stream)
    assert price.calls <= count * (count + 1) / 2 + count
