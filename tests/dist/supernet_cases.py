"""Training of small supernets on a rank, for the distributed tests."""

import torch

from thinwire.systems.supernet import Space
from thinwire.systems.supernet.stereo import ElasticStereo, Phase, RandomDots, SupernetTrainer
from thinwire.systems.supernet.stereo.data import collate, shuffled

SPACE = Space(kernels=(3, 5, 7), depths=(1, 2), expands=(2, 4), scales=(2,))
PHASE = Phase("p", SPACE, 100, 0.05, sub_nets=2, flat=100)


def net_of(dtype=torch.float32):
    torch.manual_seed(3)
    return ElasticStereo.tiny().to(dtype)


def batch_of(step, size, rank, world, dtype=torch.float32, length=32):
    data = RandomDots(length, 24, 48, 9)
    batch = collate(data, shuffled(length, 0, step, size, rank, world))
    return type(batch)(*(x.to(dtype) for x in (batch.left, batch.right, batch.disparity)))


def train(rank, world, steps, size, *, dtype=torch.float32, frozen=False, momentum=0.9, phase=PHASE, **options):
    """Returns (network, trainer, reports)."""
    net = net_of(dtype)
    net.train(not frozen)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=momentum)
    trainer = SupernetTrainer(net, phase, optimizer, **options)
    reports = [trainer.step(batch_of(step, size, rank, world, dtype), step) for step in range(steps)]
    return net, trainer, reports


def weights(net):
    return [p.detach().clone() for p in net.parameters()]
