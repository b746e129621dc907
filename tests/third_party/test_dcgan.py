"""DCGAN's loop: two networks, two Adams; what the generator's pass leaves in the discriminator is dropped."""

import pytest
import torch
from loops import Trail, Wire, assert_equal, assert_ranks_equal
from torch import nn

from spawned import run

pytestmark = pytest.mark.dist

NOISE, BATCH, STEPS = 12, 16, 24


def _generator():
    return nn.Sequential(
        nn.ConvTranspose2d(NOISE, 24, 4, bias=False),
        nn.BatchNorm2d(24),
        nn.ReLU(inplace=True),
        nn.ConvTranspose2d(24, 1, 4, stride=2, padding=1, bias=False),
        nn.Tanh(),
    )


def _discriminator():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1, bias=False),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(16, 1, 2, bias=False),
        nn.Sigmoid(),
    )


def _weights_init(module):
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.05)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


def _train(rank, way, method="ssgd", *, held=False, steps=STEPS, **how):
    """The discriminator's loss is what is recorded.

    Args:
        held: whether the pass over real images stays on its rank until the one over made images.
    """
    torch.manual_seed(999)
    from sklearn.datasets import load_digits  # a second of imports, which only the process of this file needs

    images = torch.tensor(load_digits().images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    made_by, judged_by = _generator().apply(_weights_init), _discriminator().apply(_weights_init)
    of_g = torch.optim.Adam(made_by.parameters(), lr=1e-3, betas=(0.5, 0.999))
    of_d = torch.optim.Adam(judged_by.parameters(), lr=4e-3, betas=(0.5, 0.999))
    criterion, draw, trail = nn.BCELoss(), torch.Generator().manual_seed(rank), Trail()
    real_label, fake_label = torch.ones(BATCH), torch.zeros(BATCH)
    with Wire(way, made_by, of_g, method, **how) as g, Wire(way, judged_by, of_d, method, **how) as d:
        for _ in range(steps):
            d.net.zero_grad()
            real = images[torch.randint(len(images), (BATCH,), generator=draw)]
            with d.sync_if(not held):
                of_real = criterion(d.net(real).view(-1), real_label)
                of_real.backward()
            fake = g.net(torch.randn(BATCH, NOISE, 1, 1, generator=draw))
            of_fake = criterion(d.net(fake.detach()).view(-1), fake_label)
            of_fake.backward()
            of_d.step()
            g.net.zero_grad()
            criterion(d.net(fake).view(-1), real_label).backward()  # on top of what of_d has used
            of_g.step()
            trail.step(of_real + of_fake, judged_by, made_by)
        trail.buffers = [b.clone() for net in (made_by, judged_by) for b in net.buffers()]
        if way != "ddp":
            trail.stats = [g.ours.stats(), d.ours.stats()]
    return trail


def _exact(rank, size, held):
    return {way: _train(rank, way, held=held) for way in ("ddp", "hook", "attach")}


@pytest.mark.parametrize("held", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ssgd_is_ddp(held):
    results = run(_exact, 2, held)
    for found in results:
        for way in ("hook", "attach"):
            assert_equal(found[way], found["ddp"])
            assert [s.dropped_steps for s in found[way].stats] == [0, 0]  # nothing is kept, so nothing is dropped
    assert_ranks_equal([found["attach"] for found in results])
    # DDP sends rank 0's statistics before a forward, and attach after a backward: on rank 0 they are the same.
    first, second = results
    for a, b, theirs in zip(first["attach"].buffers, second["attach"].buffers, first["ddp"].buffers):
        assert torch.equal(a, b)
        assert torch.equal(a, theirs)
