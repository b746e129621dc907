"""Synthetic pairs with exact truth: random dots that only stereo matching can read, and textured scenes.

Random-dot stereograms: Julesz, Foundations of Cyclopean Perception, 1971. The left view is looked up in the right one,
so the truth is exact for every left pixel inside the right view; the others get new noise and no truth.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from thinwire.systems.supernet.stereo.pairs import digest, normalise

KINDS = ("pieces", "plane", "zero", "scene")


def random_dot_pair(
    batch: int,
    height: int,
    width: int,
    max_disparity: float,
    generator: torch.Generator,
    kind: str = "pieces",
    min_disparity: float = 2.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a batch of stereograms.

    Args:
        batch, height, width: sizes. max_disparity, min_disparity: in pixels, both inclusive.
        generator: for all random numbers.
        kind: "pieces": a far background and three rectangles at integer disparities; "plane": one slanted plane;
            "zero": no disparity; "scene": slanted pieces with coarse and fine texture, and views of different
            brightness.

    Returns:
        left, right ``[B, 3, H, W]`` in 0..1, and the left view's disparity ``[B, H, W]``, infinite where unknown.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is unknown; use one of {', '.join(KINDS)}")
    if not 0 <= min_disparity <= max_disparity < width:
        raise ValueError(f"disparities from {min_disparity} to {max_disparity} do not fit a width of {width}")
    draw = _Draws(generator)
    if kind == "pieces":
        disparity = _pieces(draw, batch, height, width, round(min_disparity), round(max_disparity))
    elif kind == "plane":
        disparity = torch.stack([_slanted(draw, height, width, min_disparity, max_disparity) for _ in range(batch)])
    elif kind == "zero":
        disparity = torch.zeros(batch, height, width)
    else:
        disparity = torch.stack([_scene(draw, height, width, min_disparity, max_disparity) for _ in range(batch)])
    scene = kind == "scene"
    right = _texture(draw, batch, height, width) if scene else draw.uniform(batch, 3, height, width)
    place = torch.arange(width) - disparity
    first = place.floor()
    part = (place - first).unsqueeze(1)
    inside = place >= 0
    index = first.clamp(0, width - 1).long().unsqueeze(1).expand(-1, 3, -1, -1)
    following = (index + 1).clamp_max(width - 1)
    left = right.gather(3, index) * (1 - part) + right.gather(3, following) * part
    fresh = _texture(draw, batch, height, width) if scene else draw.uniform(batch, 3, height, width)
    left = torch.where(inside.unsqueeze(1), left, fresh)
    if scene:
        left, right = _photograph(draw, left), _photograph(draw, right)
    return left, right, torch.where(inside, disparity, torch.inf)


class RandomDots:
    """A set of stereograms, each generated on access, always the same; see :class:`~thinwire.supernet.Pairs`.

    Args:
        length: how many. height, width: sizes.
        max_disparity, kind, min_disparity: see :func:`random_dot_pair`. seed: of the set.
    """

    def __init__(
        self,
        length: int,
        height: int,
        width: int,
        max_disparity: float,
        kind: str = "pieces",
        seed: int = 0,
        min_disparity: float = 2.0,
    ) -> None:
        if length < 1 or height < 1 or width < 1:
            raise ValueError(f"a set of {length} stereograms of {height}x{width} is empty")
        self._length, self._size, self._seed = length, (height, width), seed
        self._range, self._kind = (max_disparity, min_disparity), kind
        self[0]  # raises if the arguments are invalid

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        if not 0 <= index < self._length:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(digest("dots", self._seed, index) >> 1)
        height, width = self._size
        most, least = self._range
        left, right, disparity = random_dot_pair(1, height, width, most, generator, self._kind, least)
        return normalise(left[0]), normalise(right[0]), disparity[0]


class _Draws:
    """Random numbers from one generator."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator)

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * float(self.uniform(1))

    def whole(self, low: int, high: int) -> int:
        """Return an integer from low to high, both inclusive."""
        return int(torch.randint(low, high + 1, (1,), generator=self._generator))


def _box(draw: _Draws, height: int, width: int) -> tuple[slice, slice]:
    h, w = draw.whole(height // 5, height // 2), draw.whole(width // 8, width // 3)
    top, start = draw.whole(0, height - h), draw.whole(0, width - w)
    return slice(top, top + h), slice(start, start + w)


def _pieces(draw: _Draws, batch: int, height: int, width: int, low: int, high: int) -> Tensor:
    disparity = torch.empty(batch, height, width)
    for plane in disparity:
        plane.fill_(draw.whole(low, low + (high - low) // 3))
        for _ in range(3):
            plane[_box(draw, height, width)] = draw.whole(low, high)
    return disparity


def _slanted(draw: _Draws, height: int, width: int, low: float, high: float) -> Tensor:
    """Return a plane through random disparities at three corners, clamped to the range."""
    a, b, c = (draw.between(low, high) for _ in range(3))
    y, x = torch.linspace(0, 1, height)[:, None], torch.linspace(0, 1, width)
    return (a + (b - a) * y + (c - a) * x).clamp(low, high)


def _scene(draw: _Draws, height: int, width: int, low: float, high: float) -> Tensor:
    """Return a far background and slanted pieces in front of it, the nearest last; half of them are ellipses."""
    middle = low + 0.4 * (high - low)
    disparity = _slanted(draw, height, width, low, middle)
    depths = sorted(draw.between(low, high) for _ in range(draw.whole(3, 8)))
    for depth in depths:
        rows, columns = _box(draw, height, width)
        h, w = rows.stop - rows.start, columns.stop - columns.start
        spread = 0.1 * (high - low)
        piece = _slanted(draw, h, w, max(low, depth - spread), min(high, depth + spread))
        y, x = torch.linspace(-1, 1, h)[:, None], torch.linspace(-1, 1, w)
        shown = (y * y + x * x <= 1) if draw.whole(0, 1) else torch.ones(h, w, dtype=torch.bool)
        disparity[rows, columns] = torch.where(shown, piece, disparity[rows, columns])
    return disparity


def _texture(draw: _Draws, batch: int, height: int, width: int) -> Tensor:
    """Return noise at several sizes, with correlated colours as in pictures, and flat areas."""
    total = torch.zeros(batch, 3, height, width)
    for size in (1, 2, 4, 8, 16):
        h, w = -(-height // size), -(-width // size)
        grey, colour = draw.uniform(batch, 1, h, w) - 0.5, draw.uniform(batch, 3, h, w) - 0.5
        strength = draw.uniform(batch, 1, 1, 1) * size**0.5
        total += strength * F.interpolate(grey + 0.3 * colour, (height, width), mode="bilinear", align_corners=False)
    contrast = 0.1 + 0.4 * draw.uniform(batch, 1, 1, 1)
    return (0.5 + contrast * total / total.std((1, 2, 3), keepdim=True)).clamp(0, 1)


def _photograph(draw: _Draws, image: Tensor) -> Tensor:
    """Change the exposure and add a little noise."""
    batch = image.shape[0]
    gain, shift = 0.9 + 0.2 * draw.uniform(batch, 1, 1, 1), 0.1 * (draw.uniform(batch, 1, 1, 1) - 0.5)
    noise = 0.02 * (draw.uniform(*image.shape) - 0.5)
    return (gain * image + shift + noise).clamp(0, 1)
