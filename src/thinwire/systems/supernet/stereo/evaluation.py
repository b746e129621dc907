"""Set BatchNorm's statistics for one sub-network, from training images on all ranks; and compute its error on others.

Statistics gathered while sub-networks take turns do not fit any of them. Both functions are programs:
``sync.services.run`` runs them on the ranks, ``thinwire.engine.executors.alone.run_alone`` in one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.core.program import AllReduce, Program
from thinwire.engine.executors.alone import run_alone
from thinwire.systems.supernet.space import SubNet
from thinwire.systems.supernet.stereo.data import StereoBatch
from thinwire.systems.supernet.stereo.network import ElasticStereo
from thinwire.systems.supernet.stereo.training import valid


@dataclass(frozen=True)
class Metrics:
    """Sums over valid pixels.

    Attributes:
        pixels: how many. error: sum of absolute errors in pixels.
        over1, over2, over3: pixels with a larger error. outliers: error above 3 px and above 5 % (D1 of KITTI).
    """

    pixels: float = 0.0
    error: float = 0.0
    over1: float = 0.0
    over2: float = 0.0
    over3: float = 0.0
    outliers: float = 0.0

    @property
    def epe(self) -> float:
        """End-point error: mean absolute error in pixels; NaN without a valid pixel."""
        return self.error / self.pixels if self.pixels else float("nan")

    @property
    def d1(self) -> float:
        return self.outliers / self.pixels if self.pixels else float("nan")

    @property
    def bad3(self) -> float:
        """Share of pixels with an error above 3."""
        return self.over3 / self.pixels if self.pixels else float("nan")

    def vector(self) -> Tensor:
        return torch.tensor(astuple(self), dtype=torch.float64)


def measure(disparity: Tensor, truth: Tensor, max_disparity: float) -> Metrics:
    """Compare ``[B, H, W]`` with the truth where it is valid."""
    mask = valid(truth, max_disparity)
    goal = torch.where(mask, truth, 0.0).double()
    error = torch.where(mask, (disparity.double() - goal).abs(), 0.0)
    one, two, three = (float((error > bound).sum()) for bound in (1, 2, 3))
    outliers = float(((error > 3) & (error > 0.05 * goal)).sum())
    return Metrics(float(mask.sum()), float(error.sum()), one, two, three, outliers)


def active_norms(net: ElasticStereo, sub_net: SubNet) -> list[tuple[nn.BatchNorm2d, int]]:
    """Return the BatchNorms that a sub-network uses, and how many channels of each."""
    bounds = net.active_set(sub_net).bounds
    norms = [(name, module) for name, module in net.named_modules() if isinstance(module, nn.BatchNorm2d)]
    return [(norm, b[0][1]) for name, norm in norms if (b := bounds[f"{name}.weight"]) is not None]


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
    found = Metrics().vector()
    for batch in batches:
        found += measure(net(batch.left, batch.right)[-1], batch.disparity, net.max_disparity).vector()
    net.train(was)
    device = next(net.parameters()).device
    return Metrics(*(yield AllReduce(found.to(device))).tolist())


class Calibrated:
    """Calling it calibrates a sub-network and returns minus its end-point error in pixels: the higher the better."""

    def __init__(self, net: ElasticStereo, calibration: Sequence[StereoBatch], held_out: Sequence[StereoBatch]) -> None:
        if not calibration or not held_out:
            raise ValueError("calibration and evaluation need at least one batch each")
        self._net, self._calibration, self._held_out = net, calibration, held_out

    def __call__(self, sub_net: SubNet) -> float:
        return -self.metrics(sub_net).epe

    def metrics(self, sub_net: SubNet) -> Metrics:
        run_alone(calibrate(self._net, sub_net, self._calibration))
        found: Metrics = run_alone(evaluate(self._net, sub_net, self._held_out))
        return found


def constant_guess(held_out: Sequence[StereoBatch], max_disparity: float) -> float:
    """Return the end-point error of the median of the truth, the best constant: every network must be better."""
    known: Tensor = torch.cat([batch.disparity.flatten() for batch in held_out])
    known = known[valid(known, max_disparity)]
    return float((known - known.median()).abs().mean()) if known.numel() else float("nan")


def box_match(left: Tensor, right: Tensor, disparities: int, window: int = 9) -> Tensor:
    """Find for each left pixel the shift with the smallest mean absolute difference of colours in a square window.

    Args:
        left, right: views ``[3, H, W]`` in 0..1.
        disparities: shifts from 0 to this, exclusive. window: side of the square, odd; it ends at the border.

    Returns:
        ``[H, W]``, whole pixels: no smoothing, no check from the other side, nothing between pixels.
    """
    height, width = left.shape[1:]
    best = torch.full((height, width), torch.inf, dtype=left.dtype)
    found = torch.zeros(height, width, dtype=left.dtype)
    for d in range(min(disparities, width)):
        cost = left.new_full((1, 1, height, width), 3.0)  # dearer than any difference: out of the right view
        cost[0, 0, :, d:] = (left[:, :, d:] - right[:, :, : width - d]).abs().mean(0)
        mean = F.avg_pool2d(cost, window, 1, window // 2, count_include_pad=False)[0, 0]
        better = mean < best
        best, found = torch.where(better, mean, best), torch.where(better, float(d), found)
    return found
