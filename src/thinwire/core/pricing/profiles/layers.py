"""From layers with FLOPs to a profile: which module has which parameters, and how long each gradient takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.core.pricing.profiles.profile import ModelProfile, ModuleTime, TensorTime


@dataclass(frozen=True)
class Layer:
    """One module in forward order.

    Attributes:
        name: name in the model.
        flops: forward FLOPs of one sample.
        parameters: (short name, shape) in order of registration; none for attention cores and tied heads.
        kind: class of the module, if it matters to a method.
    """

    name: str
    flops: float
    parameters: tuple[tuple[str, tuple[int, ...]], ...] = ()
    kind: str = ""


@dataclass(frozen=True)
class FlopsEstimate:
    """How FLOPs become seconds: samples per step and rank, and the device's sustained rate."""

    batch_size: int
    device_flops: float

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {self.batch_size}")
        if not 0 < self.device_flops < math.inf:
            raise ValueError(f"device_flops must be positive and finite, not {self.device_flops}")


def linear(name: str, inputs: int, outputs: int, positions: int = 1) -> Layer:
    """Return a fully connected layer with bias, applied at that many positions of a sample."""
    parameters = (("weight", (outputs, inputs)), ("bias", (outputs,)))
    return Layer(name, 2.0 * inputs * outputs * positions, parameters)


def convolution(name: str, inputs: int, outputs: int, kernel: int, side: int, *, bias: bool = False) -> Layer:
    """Return a square convolution whose output is ``side`` x ``side``."""
    parameters: tuple[tuple[str, tuple[int, ...]], ...] = (("weight", (outputs, inputs, kernel, kernel)),)
    if bias:
        parameters += (("bias", (outputs,)),)
    return Layer(name, 2.0 * inputs * outputs * kernel**2 * side**2, parameters)


def norm(name: str, channels: int, positions: int) -> Layer:
    """Return batch or layer normalisation: two vectors; 8 FLOPs per element, a guess."""
    return Layer(name, 8.0 * channels * positions, (("weight", (channels,)), ("bias", (channels,))))


def estimate(name: str, layers: Sequence[Layer], how: FlopsEstimate, source: str) -> ModelProfile:
    """Build a profile whose compute time is FLOPs over the device's rate; backward costs twice as much as forward.

    The gradients of one module arrive together: the parameter registered last carries the module's time, the others
    none. The first layer needs no gradient of its input. The time of modules without parameters is added to the next
    gradient.
    """
    rate = how.device_flops / how.batch_size
    tensors: list[TensorTime] = []
    waiting = 0.0
    for position, layer in reversed(list(enumerate(layers))):
        waiting += layer.flops / rate * (2 if position else 1)
        for short, shape in reversed(layer.parameters):
            tensors.append(TensorTime(f"{layer.name}.{short}", shape, waiting, layer.kind))
            waiting = 0.0
    modules = tuple(ModuleTime(layer.name, layer.flops / rate) for layer in layers)
    source = f"{source}, {how.batch_size} samples at {how.device_flops / 1e12:g} TFLOP/s"
    return ModelProfile(name, tuple(tensors), sum(m.forward_seconds for m in modules), modules, 4, "assumed", source)
