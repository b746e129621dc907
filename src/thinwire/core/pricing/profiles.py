"""Models as numbers: tensors in backward order with their backward seconds, by name or from a file.

The seconds of well-known models are derived from FLOPs, for questions before anything is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, get_args

from thinwire.core.checks import check_choice, check_count, check_number
from thinwire.core.pricing.costs import Provenance
from thinwire.core.records import Record


@dataclass(frozen=True)
class TensorTime:
    """One parameter, and the backward seconds from the previous gradient to this one.

    ``kind``: class of the module that owns it ("Embedding"), if known: some methods keep some kinds dense.
    """

    name: str
    shape: tuple[int, ...]
    backward_seconds: float
    kind: str = ""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def module(self) -> str:
        """The module that owns it."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True)
class ModuleTime:
    """One module, in forward order, and its own forward seconds."""

    name: str
    forward_seconds: float


@dataclass(frozen=True)
class ModelProfile(Record):
    """A model as numbers, for one batch size and device.

    Attributes:
        tensors: in backward order: the gradient that is ready first comes first.
        forward_seconds: the whole forward pass; may exceed the sum over modules.
        modules: in forward order; a tensor belongs to the module whose name its own name begins with.
        dtype_bytes: bytes of one gradient element.
    """

    called: ClassVar[str] = "a thinwire profile"
    alone: ClassVar[bool] = False  # `thinwire profile` tells more

    name: str
    tensors: tuple[TensorTime, ...]
    forward_seconds: float
    modules: tuple[ModuleTime, ...] = ()
    dtype_bytes: int = 4
    provenance: Provenance = "assumed"
    source: str = ""

    def __post_init__(self) -> None:
        check_choice("provenance", self.provenance, get_args(Provenance))
        check_number("forward_seconds", self.forward_seconds, least=0)
        if self.dtype_bytes < 1:
            raise ValueError(f"dtype_bytes must be at least 1, not {self.dtype_bytes}")
        for i, tensor in enumerate(self.tensors):
            check_number(f"tensors[{i}].backward_seconds", tensor.backward_seconds, least=0)
        for i, module in enumerate(self.modules):
            check_number(f"modules[{i}].forward_seconds", module.forward_seconds, least=0)
        if len({tensor.name for tensor in self.tensors}) < len(self.tensors):
            raise ValueError("tensors: a name appears twice")

    @property
    def sizes(self) -> list[int]:
        """Elements per tensor, in backward order, as the merge rules need them."""
        return [tensor.size for tensor in self.tensors]

    @property
    def backward_seconds(self) -> list[float]:
        """Seconds per tensor, in backward order, as the merge rules need them."""
        return [tensor.backward_seconds for tensor in self.tensors]

    @property
    def elements(self) -> int:
        """Elements of the whole model."""
        return sum(self.sizes)

    def scaled(self, factor: float) -> ModelProfile:
        """Return the same model on a device that takes ``factor`` times as long."""
        check_number("factor", factor, least=0)
        tensors = tuple(replace(t, backward_seconds=t.backward_seconds * factor) for t in self.tensors)
        modules = tuple(replace(m, forward_seconds=m.forward_seconds * factor) for m in self.modules)
        source = f"{self.source}, scaled by {factor:g}".lstrip(", ")
        forward = self.forward_seconds * factor
        return ModelProfile(self.name, tensors, forward, modules, self.dtype_bytes, "assumed", source)


@dataclass(frozen=True)
class Layer:
    """One module in forward order: FLOPs of one sample, and parameters (short name, shape) in order of registration.

    Attention cores and tied heads have no parameters. ``kind``: class of the module, if it matters to a method.
    """

    name: str
    flops: float
    parameters: tuple[tuple[str, tuple[int, ...]], ...] = ()
    kind: str = ""


def linear(name: str, inputs: int, outputs: int, positions: int = 1) -> Layer:
    parameters = (("weight", (outputs, inputs)), ("bias", (outputs,)))
    return Layer(name, 2.0 * inputs * outputs * positions, parameters)


def convolution(name: str, inputs: int, outputs: int, kernel: int, side: int, *, bias: bool = False) -> Layer:
    parameters: tuple[tuple[str, tuple[int, ...]], ...] = (("weight", (outputs, inputs, kernel, kernel)),)
    if bias:
        parameters += (("bias", (outputs,)),)
    return Layer(name, 2.0 * inputs * outputs * kernel**2 * side**2, parameters)


def norm(name: str, channels: int, positions: int) -> Layer:
    """Return batch or layer normalisation: two vectors; 8 FLOPs per element, a guess."""
    return Layer(name, 8.0 * channels * positions, (("weight", (channels,)), ("bias", (channels,))))


def estimate(name: str, layers: Sequence[Layer], batch_size: int, device_flops: float) -> ModelProfile:
    """Build a profile whose compute time is FLOPs over the device's rate; backward costs twice as much as forward.

    The gradients of one module arrive together: the parameter registered last carries the module's time, the others
    none. The first layer needs no gradient of its input. The time of modules without parameters is added to the next
    gradient.
    """
    check_count("batch_size", batch_size)
    check_number("device_flops", device_flops, above=0)
    rate = device_flops / batch_size
    tensors: list[TensorTime] = []
    waiting = 0.0
    for position, layer in reversed(list(enumerate(layers))):
        waiting += layer.flops / rate * (2 if position else 1)
        for short, shape in reversed(layer.parameters):
            tensors.append(TensorTime(f"{layer.name}.{short}", shape, waiting, layer.kind))
            waiting = 0.0
    modules = tuple(ModuleTime(layer.name, layer.flops / rate) for layer in layers)
    source = f"FLOPs of the layers, {batch_size} samples at {device_flops / 1e12:g} TFLOP/s"
    return ModelProfile(name, tuple(tensors), sum(m.forward_seconds for m in modules), modules, 4, "assumed", source)


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
        batch_size: samples per rank; None: a common one.
        device_flops: FLOP/s that the device sustains.
        sequence_length: positions per sample, for BERT (at most 512) and GPT-2 (at most 1,024).

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
    return estimate(name, layers(positions), usual if batch_size is None else batch_size, device_flops)


def densenet(blocks: Sequence[int]) -> list[Layer]:
    channels, growth, side = 64, 32, 56
    layers = [convolution("features.conv0", 3, channels, 7, 112), norm("features.norm0", channels, 112**2)]
    for b, count in enumerate(blocks, 1):
        for n in range(1, count + 1):
            name = f"features.denseblock{b}.denselayer{n}"
            layers.append(norm(f"{name}.norm1", channels, side**2))
            layers.append(convolution(f"{name}.conv1", channels, 4 * growth, 1, side))
            layers.append(norm(f"{name}.norm2", 4 * growth, side**2))
            layers.append(convolution(f"{name}.conv2", 4 * growth, growth, 3, side))
            channels += growth
        if b < len(blocks):
            name = f"features.transition{b}"
            layers.append(norm(f"{name}.norm", channels, side**2))
            layers.append(convolution(f"{name}.conv", channels, channels // 2, 1, side))
            channels, side = channels // 2, side // 2
    return [*layers, norm("features.norm5", channels, side**2), linear("classifier", channels, 1000)]


def vgg16() -> list[Layer]:
    layers: list[Layer] = []
    inputs, side, place = 3, 224, 0
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers.append(convolution(f"features.{place}", inputs, width, 3, side, bias=True))
            inputs, place = width, place + 2  # a ReLU in between
        side, place = side // 2, place + 1  # the pooling
    layers.append(linear("classifier.0", 512 * 7 * 7, 4096))
    layers.append(linear("classifier.3", 4096, 4096))
    return [*layers, linear("classifier.6", 4096, 1000)]


def bottleneck_resnet(blocks: Sequence[int]) -> list[Layer]:
    layers: list[Layer] = []

    def add(conv: str, bn: str, inputs: int, outputs: int, kernel: int, side: int) -> None:
        layers.append(convolution(conv, inputs, outputs, kernel, side))
        layers.append(norm(bn, outputs, side**2))

    add("conv1", "bn1", 3, 64, 7, 112)
    inputs, side = 64, 56
    for stage, count in enumerate(blocks):
        width = 64 * 2**stage
        for block in range(count):
            name = f"layer{stage + 1}.{block}"
            outer = side
            if stage and block == 0:
                side //= 2  # the 3 x 3 convolution has the stride
            add(f"{name}.conv1", f"{name}.bn1", inputs, width, 1, outer)
            add(f"{name}.conv2", f"{name}.bn2", width, width, 3, side)
            add(f"{name}.conv3", f"{name}.bn3", width, 4 * width, 1, side)
            if block == 0:
                add(f"{name}.downsample.0", f"{name}.downsample.1", inputs, 4 * width, 1, side)
            inputs = 4 * width
    return [*layers, linear("fc", inputs, 1000)]


def _table(name: str, rows: int, hidden: int, positions: int) -> Layer:
    return Layer(name, float(hidden * positions), (("weight", (rows, hidden)),), "Embedding")


def _attention(name: str, hidden: int, positions: int) -> Layer:
    """Return scores and weighted sum: no parameters, two products of positions x positions x hidden."""
    return Layer(name, 4.0 * positions**2 * hidden)


def bert(hidden: int, depth: int, positions: int, *, vocabulary: int = 30522, heads: bool = False) -> list[Layer]:
    """Return the layers of a BERT encoder with pooler; ``heads=True`` adds both pre-training heads, decoder tied."""
    layers = [
        _table("embeddings.word_embeddings", vocabulary, hidden, positions),
        _table("embeddings.position_embeddings", 512, hidden, positions),
        _table("embeddings.token_type_embeddings", 2, hidden, positions),
        norm("embeddings.LayerNorm", hidden, positions),
    ]
    for i in range(depth):
        name = f"encoder.layer.{i}"
        for part in ("query", "key", "value"):
            layers.append(linear(f"{name}.attention.self.{part}", hidden, hidden, positions))
        layers.append(_attention(f"{name}.attention.self", hidden, positions))
        layers.append(linear(f"{name}.attention.output.dense", hidden, hidden, positions))
        layers.append(norm(f"{name}.attention.output.LayerNorm", hidden, positions))
        layers.append(linear(f"{name}.intermediate.dense", hidden, 4 * hidden, positions))
        layers.append(linear(f"{name}.output.dense", 4 * hidden, hidden, positions))
        layers.append(norm(f"{name}.output.LayerNorm", hidden, positions))
    layers.append(linear("pooler.dense", hidden, hidden))
    if heads:
        layers.append(linear("cls.predictions.transform.dense", hidden, hidden, positions))
        layers.append(norm("cls.predictions.transform.LayerNorm", hidden, positions))
        decoder = 2.0 * hidden * vocabulary * positions  # its matrix is the embedding
        layers.append(Layer("cls.predictions", decoder, (("bias", (vocabulary,)),)))
        layers.append(linear("cls.seq_relationship", hidden, 2))
    return layers


def gpt2(hidden: int, depth: int, positions: int, *, vocabulary: int = 50257) -> list[Layer]:
    """Return the layers of GPT-2; the output head is tied to the embedding and only costs time."""
    layers = [
        _table("transformer.wte", vocabulary, hidden, positions),
        _table("transformer.wpe", 1024, hidden, positions),
    ]
    for i in range(depth):
        name = f"transformer.h.{i}"
        layers.append(norm(f"{name}.ln_1", hidden, positions))
        layers.append(_product(f"{name}.attn.c_attn", hidden, 3 * hidden, positions))
        layers.append(_attention(f"{name}.attn", hidden, positions))
        layers.append(_product(f"{name}.attn.c_proj", hidden, hidden, positions))
        layers.append(norm(f"{name}.ln_2", hidden, positions))
        layers.append(_product(f"{name}.mlp.c_fc", hidden, 4 * hidden, positions))
        layers.append(_product(f"{name}.mlp.c_proj", 4 * hidden, hidden, positions))
    layers.append(norm("transformer.ln_f", hidden, positions))
    return [*layers, Layer("lm_head", 2.0 * hidden * vocabulary * positions)]


def _product(name: str, inputs: int, outputs: int, positions: int) -> Layer:
    parameters = (("weight", (inputs, outputs)), ("bias", (outputs,)))
    return Layer(name, 2.0 * inputs * outputs * positions, parameters)


def kronecker_shapes(profile: ModelProfile) -> list[tuple[str, int, int]]:
    """Return (module, d_A, d_G) in order of registration: weights with two or four dimensions; not embeddings.

    Tensors are named ``<module>.weight`` and ``<module>.bias``; a bias adds a row to A.
    """
    biased = {tensor.module for tensor in profile.tensors if tensor.name.endswith(".bias")}
    found = []
    for tensor in reversed(profile.tensors):
        matrix = tensor.name.endswith(".weight") and len(tensor.shape) in (2, 4)
        if matrix and not tensor.kind.startswith("Embedding"):
            rows = tensor.shape[0]
            found.append((tensor.module, tensor.size // rows + (tensor.module in biased), rows))
    return found
