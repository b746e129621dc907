"""A batch of 8192 on scikit-learn's digits, enlarged: LARS is as good as a small batch, scaled SGD does not train."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from thinwire.systems.optim import LARS, param_groups, scaled_lr, warmup_poly
from thinwire.tools.bench.models.digits import enlarged, images

EPOCHS = 20


def accuracy(seed, batch, make, warm_epochs):
    """Of the untouched digits, after 20 epochs."""
    x, y, test_x, test_y = enlarged()
    x, test_x = x.flatten(1), test_x.flatten(1)
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    for layer in net[::2]:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)
    optimizer = make(net)
    per_epoch = len(x) // batch
    schedule = warmup_poly(optimizer, total_steps=EPOCHS * per_epoch, warmup_steps=warm_epochs * per_epoch)
    for _ in range(EPOCHS):
        order = torch.randperm(len(x))
        for i in range(per_epoch):
            chosen = order[i * batch : (i + 1) * batch]
            F.cross_entropy(net(x[chosen]), y[chosen]).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    with torch.no_grad():
        return float((net(test_x).argmax(1) == test_y).float().mean())


def sgd(lr):
    return lambda net: torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)


def lars(net):
    return LARS(param_groups(net, 1e-4, skip_lr_scale=0.01), lr=40.0, momentum=0.9)


def test_the_enlarged_digits_are_as_many_as_said():
    pytest.importorskip("sklearn")
    x, y, test_x, test_y = enlarged()
    assert (len(x), len(y), len(test_x), len(test_y)) == (64665, 64665, 360, 360)
    first = images()[0][0, 0]
    assert torch.allclose(x[4 * 5 * 1437, 0], first, atol=0.3)  # the fifth place of nine is its own
    assert torch.allclose(x[0, 0, 1:, 1:], first[:-1, :-1], atol=0.3)  # the first is one down and to the right
    assert x[0, 0, 0].abs().max() < 0.3


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_lars_keeps_the_accuracy_of_a_small_batch(seed):
    pytest.importorskip("sklearn")
    small = accuracy(seed, 128, sgd(0.1), 1)
    scaled = accuracy(seed, 8192, sgd(scaled_lr(0.1, 8192, 128)), 2)
    tuned = accuracy(seed, 8192, sgd(0.4), 2)
    ours = accuracy(seed, 8192, lars, 2)
    print(f"SGD 128: {small:.4f}; at 8192: scaled SGD {scaled:.4f}, tuned SGD {tuned:.4f}, LARS {ours:.4f}")
    assert small > 0.985
    assert scaled < 0.9
    assert ours >= small - 0.01
