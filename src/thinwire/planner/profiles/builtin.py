"""Well-known models by name, with compute seconds derived from FLOPs, for questions before anything is measured."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.planner.profiles.convolutional import bottleneck_resnet, densenet, vgg16
from thinwire.planner.profiles.layers import FlopsEstimate, Layer, estimate
from thinwire.planner.profiles.profile import ModelProfile
from thinwire.planner.profiles.transformer import bert, gpt2

# Name: samples per rank (as in the papers' scripts, if they set it), positions per sample, layers.
_MODELS: dict[str, tuple[int, int, Callable[[int], list[Layer]]]] = {
    "resnet50": (64, 0, lambda _: bottleneck_resnet((3, 4, 6, 3))),
    "resnet152": (32, 0, lambda _: bottleneck_resnet((3, 8, 36, 3))),
    "densenet201": (32, 0, lambda _: densenet((6, 12, 48, 32))),
    "vgg16": (64, 0, lambda _: vgg16()),
    "bert-base": (64, 64, lambda positions: bert(768, 12, positions)),
    "bert-large": (32, 64, lambda positions: bert(1024, 24, positions)),
    "gpt2": (8, 512, lambda positions: gpt2(768, 12, positions)),
}
BUILTIN = tuple(_MODELS)
"""The names that ``builtin`` accepts."""


def builtin(
    name: str,
    *,
    batch_size: int | None = None,
    device_flops: float = 1e13,
    sequence_length: int | None = None,
) -> ModelProfile:
    """Return the profile of a well-known model; its shapes are exact, its seconds are assumed.

    Args:
        name: one of ``BUILTIN``.
        batch_size: samples per rank; None: a common one.
        device_flops: FLOP/s that the device sustains.
        sequence_length: positions per sample, for BERT (at most 512) and GPT-2 (at most 1,024).

    Raises:
        ValueError: an unknown name, or an option that does not apply.

    Example:
        >>> builtin("resnet50").elements
        25557032
    """
    if name not in _MODELS:
        raise ValueError(f"model {name!r} is unknown; use one of {', '.join(BUILTIN)}")
    usual, positions, layers = _MODELS[name]
    if sequence_length is not None:
        most = 1024 if name == "gpt2" else 512
        if not positions or not 1 <= sequence_length <= most:
            raise ValueError(f"sequence_length={sequence_length} does not fit {name}")
        positions = sequence_length
    how = FlopsEstimate(usual if batch_size is None else batch_size, device_flops)
    return estimate(name, layers(positions), how, "FLOPs of the layers")
