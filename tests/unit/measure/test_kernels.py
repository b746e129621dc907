import itertools

import torch

from thinwire.core.pricing.costs import assumed_compute
from thinwire.predict.measure import kernels
from thinwire.predict.measure.kernels import KERNELS, kernel_cases, multiply_flops, orthogonalise_flops


def small(monkeypatch):
    for name, value in {
        "POOL": 1 << 14, "RANDOM": 1 << 12, "SELECT": (256, 4096), "MEMORY": (256, 4096),
        "SQUARES": (8, 64), "TALL": ((16, 2), (64, 4)),
    }.items():  # fmt: skip
        monkeypatch.setattr(kernels, name, value)


def test_curves_are_named_as_the_planner_names_them(monkeypatch):
    small(monkeypatch)
    assert set(KERNELS) == set(assumed_compute())
    met = []
    cases = kernel_cases(torch.device("cpu"), seconds=0.0, meet=lambda: met.append(1))
    assert [name for name, _ in cases] == list(KERNELS)
    assert len(met) == len(KERNELS)


def test_amounts_and_medians(monkeypatch):
    small(monkeypatch)
    ticks = itertools.count()
    points = dict(kernel_cases(torch.device("cpu"), seconds=0.0, clock=lambda: float(next(ticks))))
    assert points["select"] == [(256, 1.0), (4096, 1.0)]
    assert points["memory"] == [(3072, 1.0), (49152, 1.0)]  # a sum into a third piece: 3 passes
    assert points["multiply"] == [(multiply_flops(8, 8, 16), 0.5), (multiply_flops(64, 64, 16), 0.5)]
    assert points["thin"] == [(64, 0.5), (4096, 0.5)]
    assert points["orthogonalise"] == [(orthogonalise_flops(16, 2), 1.0), (orthogonalise_flops(64, 4), 1.0)]
