"""Small models and training loops that the distributed tests share."""

import logging

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw


def model(width=24, depth=3, dtype=torch.float32):
    torch.manual_seed(1)
    layers = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 5)).to(dtype)


def batch(rank, step, width=24, dtype=torch.float32):
    g = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(6, width, generator=g).to(dtype), torch.randn(6, 5, generator=g).to(dtype)


def loss_of(net, rank, step, width=24, dtype=torch.float32):
    x, y = batch(rank, step, width, dtype)
    return (net(x) - y).square().mean()


def down(loss, optimizer):
    """A step of plain training, down the gradient of a loss."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def walk(net, optimizer, rank, first, last):
    """Plain steps on the batches of these numbers."""
    for step in range(first, last):
        down(loss_of(net, rank, step), optimizer)


def logged():
    """What thinwire logs from now on."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("thinwire")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return lines


def said(call):
    """The error that a call raises, as text; "" if it raises none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def spread(net):
    """How far the ranks' weights are from rank 0's, at most."""
    mine = torch.cat([x.detach().reshape(-1) for x in net.parameters()])
    first = mine.clone()
    torch.distributed.broadcast(first, 0)
    most = (mine - first).abs().max()
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
    return float(most)


def train(rank, steps, method, options=None, attach=None, net=None, lr=0.05, momentum=0.9):
    """Train through attach. Returns (model, sync)."""
    net = model() if net is None else net
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=momentum)
    sync = tw.attach(net, optimizer, method, **(options or {}), **(attach or {}))
    for step in range(steps):
        down(loss_of(net, rank, step), optimizer)
    return net, sync


def train_ddp(rank, steps, lr=0.05, momentum=0.9, **kwargs):
    net = model()
    ddp = DistributedDataParallel(net, **kwargs)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=momentum)
    for step in range(steps):
        down(loss_of(ddp, rank, step), optimizer)
    return net


def weights(net):
    return [p.detach().clone() for p in net.parameters()]
