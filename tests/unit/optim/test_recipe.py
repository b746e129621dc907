"""The helpers around large batches, against their formulas."""

import pytest
import torch
from torch import nn

from thinwire.systems.optim import LAMB, LARS, param_groups, scaled_lr, warmup_poly, zero_last_norm
from thinwire.tools.bench.models.synthetic import ResidualBlock, resnet18_network


def rates(scheduler, optimizer, steps):
    found = []
    for _ in range(steps):
        found.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return found


def sgd():
    a, b = (nn.Parameter(torch.ones(2)) for _ in range(2))
    return torch.optim.SGD([{"params": [a], "lr": 8.0}, {"params": [b], "lr": 0.25}])


@pytest.mark.parametrize(
    "total, warm, power, start, end", [(10, 4, 2.0, 0.5, 0.125), (7, 0, 1.0, 0.0, 0.0), (3, 2, 3.0, 0, 1)]
)
def test_warmup_poly_at_every_step(total, warm, power, start, end):
    optimizer = sgd()
    scheduler = warmup_poly(optimizer, total_steps=total, warmup_steps=warm, power=power, start=start, end=end)
    for t, found in enumerate(rates(scheduler, optimizer, total + 3)):
        for peak, rate in zip((8.0, 0.25), found):
            if t < warm:
                expected = start + (peak - start) * (t + 1) / warm
            else:
                left = max(0.0, 1 - (t - warm) / (total - warm))
                expected = end + (peak - end) * left**power
            assert rate == pytest.approx(expected, abs=1e-12)


def test_warmup_poly_resumes_in_the_middle():
    options = {"total_steps": 12, "warmup_steps": 5}
    one = sgd()
    straight = rates(warmup_poly(one, **options), one, 12)
    first = sgd()
    scheduler = warmup_poly(first, **options)
    assert rates(scheduler, first, 7) == straight[:7]
    second = sgd()
    resumed = warmup_poly(second, total_steps=99, warmup_steps=1)
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    assert rates(resumed, second, 5) == straight[7:]


def test_scaled_lr():
    assert scaled_lr(0.1, 8192) == 0.1 * 32
    assert scaled_lr(0.1, 64, base_batch=128) == 0.05


class FancyRMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 4))  # two dimensions, and yet a norm's


def test_param_groups():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), FancyRMSNorm(), nn.Linear(4, 2), nn.Embedding(5, 4))
    net[4].weight.requires_grad_(False)
    weights, rest = param_groups(net, 1e-4, lr=2.0, skip_lr_scale=0.01)
    assert {id(p) for p in weights["params"]} == {id(net[0].weight), id(net[3].weight)}
    kept = [net[0].bias, net[1].weight, net[1].bias, net[2].weight, net[3].bias]
    assert {id(p) for p in rest["params"]} == set(map(id, kept))
    assert (weights["weight_decay"], rest["weight_decay"]) == (1e-4, 0.0)
    lars = LARS([weights, rest], 99.0)
    assert [(g["lr"], g["skip"], g["skip_lr_scale"]) for g in lars.param_groups] == [
        (2.0, "1d", 1.0),
        (2.0, "all", 0.01),
    ]
    for make in (torch.optim.SGD, torch.optim.AdamW, LAMB):  # any optimizer takes them
        made = make(param_groups(net, 0.1), lr=0.1)
        for p in [*weights["params"], *kept]:
            p.grad = torch.zeros_like(p)
        before = [p.detach().clone() for p in kept]
        made.step()
        assert all(torch.equal(a, b) for a, b in zip(before, kept))  # no decay on these


def test_param_groups_without_one_kind():
    net = nn.Linear(3, 2, bias=False)
    assert [len(g["params"]) for g in param_groups(net, 0.1)] == [1]


def test_zero_last_norm():
    net = resnet18_network(width=4)
    assert zero_last_norm(net, ResidualBlock) == 8
    for block in net.modules():
        if isinstance(block, ResidualBlock):
            assert not block.norm2.weight.any()
            assert block.norm1.weight.all()
            if not isinstance(block.shortcut, nn.Identity):
                assert block.shortcut[1].weight.all()
            else:
                x = torch.rand(2, block.conv1.in_channels, 4, 4)
                assert torch.equal(block.train()(x), x)
    nested = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Sequential(nn.LayerNorm(2))))
    with pytest.raises(ValueError, match="no ResidualBlock with a norm"):
        zero_last_norm(nested, (ResidualBlock,))
