"""ResNet, DenseNet and VGG for images of 224 x 224, with parameters as torchvision registers them."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.planner.profiles.layers import Layer, convolution, linear, norm


def densenet(blocks: Sequence[int]) -> list[Layer]:
    """Return the layers of DenseNet-121 (6, 12, 24, 16) or -201 (6, 12, 48, 32)."""
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
    """Return the layers of VGG-16 without normalisation."""
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
    """Return the layers of ResNet-50 (3, 4, 6, 3), -101 (3, 4, 23, 3) or -152 (3, 8, 36, 3)."""
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
