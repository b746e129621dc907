"""Assumed rates of well-known devices, for questions before anything is measured. Every number is "assumed".

Peaks are those of the data sheets: 16-bit tensor cores for training, fp32 for the methods' own products. One fifth of
each is assumed, and four fifths of the memory rate; the CPU entry stands for a few cores. What an H100 sustains in
training, and what it costs to start an operation on a GPU, was measured on one, and the CPU's memory on two cores of a
server (``benchmarks/device_rates.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.core.pricing.costs import Curve, Linear, assumed_compute

EFFICIENCY = 0.2
"""Share of the peak FLOP/s that training and the methods' products sustain."""
MEMORY_EFFICIENCY = 0.8

_H100_SHARE = 0.077  # median of ResNet-50, BERT-base, BERT-large and GPT-2, in TF32 and bf16, not compiled
_GPU_STARTS = {"memory": 15e-6, "multiply": 30e-6, "thin": 30e-6, "select": 100e-6, "orthogonalise": 125e-6}
"""Seconds of the smallest operation on a GPU, by curve; a selection or a QR is several dependent kernels."""


@dataclass(frozen=True)
class DeviceSpec:
    """One device.

    Attributes:
        training_peak: FLOP/s in training.
        product_peak: FLOP/s of fp32 products.
        memory_peak: bytes/s.
        node_bits_per_second: link rate between two of them in one machine.
        training_share: share of the peak that training sustains.
        thin: bytes/s of a matrix in its product with one of few columns; None: memory's.
    """

    name: str
    training_peak: float
    product_peak: float
    memory_peak: float
    node_bits_per_second: float
    node_latency_seconds: float
    backend: str
    training_share: float = EFFICIENCY
    thin: float | None = None

    @property
    def training_flops(self) -> float:
        """FLOP/s that training sustains."""
        return self.training_share * self.training_peak

    @property
    def shared_compute(self) -> bool:
        """Whether the methods' work delays backward: true on a CPU."""
        return self.backend == "gloo"

    def compute(self) -> dict[str, Curve]:
        """Return curves for ``Costs.compute``."""
        curves = assumed_compute(MEMORY_EFFICIENCY * self.memory_peak, EFFICIENCY * self.product_peak)
        if self.thin is not None:
            curves["thin"] = Linear(0.0, 4 / self.thin, "assumed", f"{self.thin / 1e9:g} GB/s")
        for name, start in _GPU_STARTS.items() if self.backend == "nccl" else ():
            line = curves[name]
            assert isinstance(line, Linear)
            source = f"{line.source}, start-up {start * 1e6:g} us"
            curves[name] = Linear(start, line.seconds_per_byte, "assumed", source)
        return curves


DEVICES = {
    device.name: device
    for device in (
        DeviceSpec("cpu", 5e11, 5e11, 30e9, 40e9, 20e-6, "gloo", thin=8e9),
        DeviceSpec("t4", 65e12, 8.1e12, 320e9, 64e9, 10e-6, "nccl"),
        DeviceSpec("v100", 125e12, 15.7e12, 900e9, 1.2e12, 5e-6, "nccl"),
        DeviceSpec("a100", 312e12, 19.5e12, 1555e9, 2.4e12, 5e-6, "nccl"),
        DeviceSpec("h100", 989e12, 67e12, 3350e9, 3.6e12, 5e-6, "nccl", _H100_SHARE),
    )
}
"""Devices by name."""
