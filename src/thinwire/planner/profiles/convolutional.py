"""DenseNet and VGG, with parameters as torchvision registers them."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.planner.profiles.layers import Layer, convolution, linear, norm


def densenet(blocks: Sequence[int], growth: int = 32, stem: int = 64, image: int = 224) -> list[Layer]:
    """Return the layers of DenseNet-121 (6, 12, 24, 16) or -201 (6, 12, 48, 32)."""
    side = image // 2
    layers = [convolution("features.conv0", 3, stem, 7, side), norm("features.norm0", stem, side**2)]
    side //= 2
    channels = stem
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


def vgg16(image: int = 224) -> list[Layer]:
    """Return the layers of VGG-16 without normalisation."""
    layers: list[Layer] = []
    inputs, side, place = 3, image, 0
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers.append(convolution(f"features.{place}", inputs, width, 3, side, bias=True))
            inputs, place = width, place + 2  # a ReLU in between
        side, place = side // 2, place + 1  # the pooling
    layers.append(linear("classifier.0", 512 * 7 * 7, 4096))
    layers.append(linear("classifier.3", 4096, 4096))
    return [*layers, linear("classifier.6", 4096, 1000)]
