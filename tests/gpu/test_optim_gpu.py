"""LARS and LAMB on CUDA: the CPU's numbers, and the host waits for nothing."""

import pytest
import torch
from torch import nn

from thinwire.systems.optim import LAMB, LARS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

MAKE = {
    "lars": lambda p: LARS(p, 0.5, weight_decay=0.01, clamp=(0.0, 1.0)),
    "nesterov": lambda p: LARS(p, 0.5, weight_decay=0.01, nesterov=True, momentum_holds="scaled_gradient"),
    "lamb": lambda p: LAMB(p, 0.01),
}


def steps(make, device, dtype):
    draw = torch.Generator().manual_seed(0)
    shapes = [(64, 32), (32,), (8, 4, 3, 3), (300, 500)]
    parameters = [nn.Parameter(torch.randn(s, generator=draw).to(device, dtype)) for s in shapes]
    optimizer = make(parameters)
    for step in range(4):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=draw).to(device, dtype)
        if device == "cuda" and step:
            torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MAKE)
def test_equal_to_the_cpu_without_waiting(name, dtype):
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for ours, cpu in zip(steps(MAKE[name], "cuda", dtype), steps(MAKE[name], "cpu", dtype)):
        torch.testing.assert_close(ours.cpu(), cpu, rtol=tolerance, atol=tolerance)
