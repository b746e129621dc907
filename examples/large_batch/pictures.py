"""A folder of JPEG files, drawn by Pillow, and the two halves of its input pipeline: what is kept, what is random."""

from __future__ import annotations

import io
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from thinwire.kernels.seeding import generator
from torch import Tensor

PIXELS = 512  # of a file's side
CLASSES = ("disc", "ring", "triangle", "square", "star", "cross")


def draw(label: int, seed: int) -> Image.Image:
    """A bright shape of some colour, place, size and angle, on a dark and noisy background."""
    dice = random.Random(seed)
    back = np.array([dice.randrange(90) for _ in range(3)])
    shape = [dice.randrange(140, 256) for _ in range(3)]
    noise = np.random.default_rng(seed).normal(0, 30, (PIXELS // 8, PIXELS // 8, 3))
    image = Image.fromarray((back + noise).clip(0, 255).astype(np.uint8)).resize((PIXELS, PIXELS))
    radius = PIXELS * dice.uniform(0.3, 0.42)
    x, y = (dice.uniform(radius, PIXELS - radius) for _ in range(2))
    turn, pen, colour = dice.uniform(-0.4, 0.4), ImageDraw.Draw(image), tuple(shape)
    kind = CLASSES[label]
    if kind in ("disc", "ring"):
        box = (x - radius, y - radius, x + radius, y + radius)
        pen.ellipse(box, fill=colour if kind == "disc" else None, outline=colour, width=int(0.4 * radius))
        return image
    if kind == "cross":
        arm = 0.2
        corners = [(1, arm), (arm, arm), (arm, 1)]
        corners = [(s * a, t * b) for s, t in ((1, 1), (-1, 1), (-1, -1), (1, -1)) for a, b in corners[:: s * t]]
        points = [complex(a, b) * complex(math.cos(turn), math.sin(turn)) for a, b in corners]
    else:
        count = {"triangle": 3, "square": 4, "star": 10}[kind]
        far = [0.45 if kind == "star" and i % 2 else 1.0 for i in range(count)]
        angles = [turn + 2 * math.pi * i / count for i in range(count)]
        points = [r * complex(math.cos(a), math.sin(a)) for r, a in zip(far, angles)]
    pen.polygon([(x + radius * p.real, y + radius * p.imag) for p in points], fill=colour)
    return image


class Folder:
    """JPEG files with their labels; a sample is (bytes of the file, label). Files that are there are not made again."""

    def __init__(self, folder: Path, count: int, first: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        numbers = range(first, first + count)
        self.samples = [(str(folder / f"{i:05d}.jpg"), i % len(CLASSES)) for i in numbers]
        for i, (path, label) in zip(numbers, self.samples):
            if not Path(path).exists():
                partial = Path(path).with_suffix(".partial")
                draw(label, seed=i).save(partial, format="JPEG", quality=90)
                partial.rename(path)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        path, label = self.samples[index]
        return Path(path).read_bytes(), label


@dataclass(frozen=True)
class Decode:
    """The prefix: the same on every run, so it is cached. Its repr names it."""

    size: int

    def __call__(self, raw: tuple[bytes, int]) -> tuple[Tensor, int]:
        """Bytes of a file and its label -> the image as uint8, ``[3, size, size]``, and its label."""
        image = Image.open(io.BytesIO(raw[0])).convert("RGB").resize((self.size, self.size), Image.Resampling.BOX)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous(), raw[1]


def resized(image: Tensor, size: int) -> Tensor:
    """What the network sees of stored images: ``[..., 3, size, size]``, fp32, around 0."""
    x = image.float().div_(255).sub_(0.5)
    if x.shape[-1] == size:
        return x
    return F.interpolate(x.view(-1, *x.shape[-3:]), (size, size), mode="area").view(*x.shape[:-2], size, size)


@dataclass(frozen=True)
class Augment:
    """The suffix: another size, a flip and a shift, drawn afresh in every epoch."""

    size: int

    def __call__(self, value: tuple[Tensor, int], draws: torch.Generator) -> tuple[Tensor, int]:
        """What the prefix gave -> what the network sees."""
        image, most = resized(value[0], self.size), self.size // 8
        flip, dy, dx = torch.randint(-most, most + 1, (3,), generator=draws).tolist()
        return torch.roll(image.flip(2) if flip > 0 else image, (dy, dx), (1, 2)), value[1]


class Uncached:
    """The same pipeline without a cache: every file is read and decoded in every epoch."""

    def __init__(self, source: Folder, prefix: Decode, suffix: Augment) -> None:
        self.source, self.prefix, self.suffix = source, prefix, suffix
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # loader workers see it change

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: other augmentations."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        value = self.prefix(self.source[index])
        return self.suffix(value, generator(0, int(self._epoch), index))
