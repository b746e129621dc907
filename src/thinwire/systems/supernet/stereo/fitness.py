"""How good a sub-network is: its end-point error on fixed pairs, after calibration on others. On one rank only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.engine.executors.alone import run_alone
from thinwire.systems.supernet.space import SubNet
from thinwire.systems.supernet.stereo.calibrate import calibrate, evaluate
from thinwire.systems.supernet.stereo.metrics import Metrics
from thinwire.systems.supernet.stereo.network import ElasticStereo
from thinwire.systems.supernet.stereo.pairs import StereoBatch


class Calibrated:
    """Calling it returns minus the end-point error in pixels: the higher the better.

    Args:
        net: afterwards it has the statistics of the last call.
        calibration: training batches for the statistics. held_out: batches for the error.
    """

    def __init__(self, net: ElasticStereo, calibration: Sequence[StereoBatch], held_out: Sequence[StereoBatch]) -> None:
        if not calibration or not held_out:
            raise ValueError("calibration and evaluation need at least one batch each")
        self._net, self._calibration, self._held_out = net, calibration, held_out

    def __call__(self, sub_net: SubNet) -> float:
        """Return minus the end-point error."""
        return -self.metrics(sub_net).epe

    def metrics(self, sub_net: SubNet) -> Metrics:
        """Return all metrics of a sub-network."""
        run_alone(calibrate(self._net, sub_net, self._calibration))
        found: Metrics = run_alone(evaluate(self._net, sub_net, self._held_out))
        return found


def constant_guess(held_out: Sequence[StereoBatch], max_disparity: float) -> float:
    """Return the end-point error of the median of the truth, the best constant: every network must be better."""
    known: Tensor = torch.cat([batch.disparity.flatten() for batch in held_out])
    known = known[known.isfinite() & (known > 0) & (known < max_disparity)]
    return float((known - known.median()).abs().mean()) if known.numel() else float("nan")
