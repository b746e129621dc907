"""Small supernets and pairs that the tests share."""

import random

import torch

from thinwire.systems.supernet.stereo import ElasticStereo, RandomDots, batches


def tiny(seed=0, **kinds):
    torch.manual_seed(seed)
    return ElasticStereo.tiny().to(**kinds)


def shaken(net, seed=0):
    """Every parameter and statistic other than at the start, so that nothing is equal by chance."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for x in [*net.parameters(), *net.buffers()]:
            noise = torch.randn(x.shape, generator=draw, dtype=torch.float64)
            if x.ndim > 1:
                x += (noise * (0.3 * float(x.double().std()) or 0.01)).to(x)  # offset convolutions begin at zero
            elif x.is_floating_point():
                x += (0.1 * noise.abs()).to(x)
    return net


def views(height=24, width=48, batch=2, seed=0, **kinds):
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, 3, height, width, generator=draw).to(**kinds) for _ in range(2))


def some(space, count, seed=0):
    rng = random.Random(seed)
    return [space.largest, space.smallest, *(space.sample(rng) for _ in range(count))]


def dots(count, height=24, width=48, seed=0, size=4):
    return list(batches(RandomDots(count, height, width, 9, seed=seed), size))
