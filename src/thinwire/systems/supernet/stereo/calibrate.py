"""Set BatchNorm's statistics for one sub-network, from training images on all ranks; and compute its error on others.

Statistics gathered while sub-networks take turns do not fit any of them. Both functions are programs:
``sync.services.run`` runs them on the ranks, ``thinwire.engine.executors.alone.run_alone`` in one process.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.core.program import AllReduce, Program
from thinwire.systems.supernet.space import SubNet
from thinwire.systems.supernet.stereo.metrics import Metrics, measure
from thinwire.systems.supernet.stereo.network import ElasticStereo
from thinwire.systems.supernet.stereo.pairs import StereoBatch


def active_norms(net: ElasticStereo, sub_net: SubNet) -> list[tuple[nn.BatchNorm2d, int]]:
    """Return the BatchNorms that a sub-network uses, and how many channels of each."""
    bounds = net.active_set(sub_net).bounds
    found = []
    for name, module in net.named_modules():
        if isinstance(module, nn.BatchNorm2d) and (b := bounds[f"{name}.weight"]) is not None:
            found.append((module, b[0][1]))
    return found


@torch.no_grad()
def calibrate(net: ElasticStereo, sub_net: SubNet, batches: Iterable[StereoBatch]) -> Program:
    """Set the running statistics that ``sub_net`` uses to their means over these batches of all ranks.

    They are batch means and biased variances, weighted by images; both views count. Nothing else changes, except that
    the sub-network is active afterwards. All ranks must run it, each with its own batches.

    Raises:
        ValueError: no rank has a batch.
    """
    net.activate(sub_net)
    norms = active_norms(net, sub_net)
    sums = {id(norm): torch.zeros(1 + 2 * c, dtype=torch.float64) for norm, c in norms}
    was = {module: module.training for module in net.modules()}
    kept = [(norm, [b.clone() for b in _buffers(norm)]) for norm, _ in norms]
    handles = [norm.register_forward_pre_hook(partial(_add, sums[id(norm)])) for norm, _ in norms]
    try:
        net.train()
        for batch in batches:
            net(batch.left, batch.right)
    finally:
        for handle in handles:
            handle.remove()
        for norm, buffers in kept:
            for target, before in zip(_buffers(norm), buffers):
                target.copy_(before)
        for module, training in was.items():
            module.training = training
    device = next(net.parameters()).device
    total = yield AllReduce(torch.cat([sums[id(norm)] for norm, _ in norms]).to(device))
    pieces = total.cpu().split([1 + 2 * c for _, c in norms])
    if any(float(piece[0]) == 0 for piece in pieces):
        raise ValueError("calibration needs at least one batch on some rank")
    for (norm, c), piece in zip(norms, pieces):
        assert norm.running_mean is not None
        assert norm.running_var is not None
        mean, var = (piece[1:] / piece[0]).split(c)
        norm.running_mean[:c] = mean.to(norm.running_mean)
        norm.running_var[:c] = var.to(norm.running_var)


def _buffers(norm: nn.BatchNorm2d) -> list[Tensor]:
    return [b for b in (norm.running_mean, norm.running_var, norm.num_batches_tracked) if b is not None]


def _add(sums: Tensor, module: nn.Module, inputs: Any) -> None:
    x = inputs[0].double()
    mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
    sums += x.shape[0] * torch.cat([mean.new_ones(1), mean, var]).cpu()


@torch.no_grad()
def evaluate(net: ElasticStereo, sub_net: SubNet, batches: Iterable[StereoBatch]) -> Program:
    """Return the :class:`Metrics` of the finest disparity over these batches of all ranks; statistics do not change."""
    net.activate(sub_net)
    was = net.training
    net.eval()
    found = Metrics()
    for batch in batches:
        found += measure(net(batch.left, batch.right)[-1], batch.disparity, net.max_disparity)
    net.train(was)
    device = next(net.parameters()).device
    return Metrics.of((yield AllReduce(found.vector().to(device))).cpu())
