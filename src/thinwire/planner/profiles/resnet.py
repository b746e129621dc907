"""ResNet with bottleneck blocks, with parameters as torchvision registers them."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.planner.profiles.layers import Layer, convolution, linear, norm


def bottleneck_resnet(blocks: Sequence[int], image: int = 224) -> list[Layer]:
    """Return the layers of ResNet-50 (3, 4, 6, 3), -101 (3, 4, 23, 3) or -152 (3, 8, 36, 3)."""
    layers: list[Layer] = []

    def add(conv: str, bn: str, inputs: int, outputs: int, kernel: int, side: int) -> None:
        layers.append(convolution(conv, inputs, outputs, kernel, side))
        layers.append(norm(bn, outputs, side**2))

    side = image // 2
    add("conv1", "bn1", 3, 64, 7, side)
    side //= 2
    inputs = 64
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
