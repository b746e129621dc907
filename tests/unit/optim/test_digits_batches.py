"""A batch of 8192 on scikit-learn's digits, enlarged: LARS trains, linearly scaled SGD does not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from thinwire.bench.models.digits import HELD_OUT, images
from thinwire.optim import LARS, param_groups, warmup_poly

EPOCHS = 20


def enlarged():
    """64,665 training images, 45 of each: nine shifts by up to a pixel, five times with noise; 360 untouched ones."""
    pixels, labels = images()
    draw = torch.Generator().manual_seed(0)
    known = len(labels) - HELD_OUT
    shifted = [torch.roll(pixels[:known], (dy, dx), (2, 3)) for dy in (-1, 0, 1) for dx in (-1, 0, 1)]
    copies = [x + 0.05 * torch.randn(x.shape, generator=draw) for x in shifted for _ in range(5)]
    return torch.cat(copies).flatten(1), labels[:known].repeat(45), pixels[known:].flatten(1), labels[known:]


def accuracy(seed, batch, make, warm_epochs):
    """Of the untouched digits, after 20 epochs."""
    x, y, test_x, test_y = enlarged()
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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_lars_trains_at_a_batch_where_scaled_sgd_does_not():
    pytest.importorskip("sklearn")
    scaled, ours = accuracy(0, 8192, sgd(6.4), 2), accuracy(0, 8192, lars, 2)
    print(f"SGD 8192, linearly scaled: {scaled:.4f}; LARS 8192: {ours:.4f}")
    assert scaled < 0.9
    assert ours >= 0.95
