"""Pairs of views with their disparity: batches, the order in which training uses them, padding."""

from __future__ import annotations

import hashlib
import importlib.util
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from thinwire.core.checks import check_choice
from thinwire.systems.supernet.stereo.layers import warp


@dataclass(frozen=True)
class StereoBatch:
    """Views ``[B, 3, H, W]``, normalised, and the disparity ``[B, H, W]`` of the left view in pixels.

    A disparity of 0, infinity or NaN is unknown.
    """

    left: Tensor
    right: Tensor
    disparity: Tensor


class Pairs(Protocol):
    """A set of pairs: sample i is (left ``[3, H, W]``, right, disparity ``[H, W]``), always the same."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor, Tensor]: ...


def normalise(image: Tensor) -> Tensor:
    """Normalise colours in 0..1, ``[..., 3, H, W]``, with ImageNet's mean and standard deviation."""
    mean, std = image.new_tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]).view(2, 3, 1, 1).unbind()
    return (image - mean) / std


def collate(pairs: Pairs, indices: Sequence[int]) -> StereoBatch:
    left, right, disparity = zip(*(pairs[i] for i in indices))
    return StereoBatch(torch.stack(left), torch.stack(right), torch.stack(disparity))


def batches(pairs: Pairs, size: int, rank: int = 0, world: int = 1) -> Iterator[StereoBatch]:
    """Yield the whole set in order, cut into batches; rank r gets batches r, r + world, ..."""
    for number, start in enumerate(range(0, len(pairs), size)):
        if number % world == rank:
            yield collate(pairs, range(start, min(start + size, len(pairs))))


def digest(*parts: object) -> int:
    """Return a seed derived from these values, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def shuffled(length: int, seed: int, step: int, batch: int, rank: int = 0, world: int = 1) -> list[int]:
    """Return which samples a rank uses at a step: consecutive entries of a permutation that is new in every epoch.

    It depends only on the arguments, so a resumed run continues where it was, and the ranks' batches of one step are
    together the batch of a single rank.
    """
    if length < 1:
        raise ValueError("the set of pairs is empty")
    start = (step * world + rank) * batch
    places = (divmod(place, length) for place in range(start, start + batch))
    return [_order(length, seed, epoch)[rest] for epoch, rest in places]


@lru_cache(1)
def _order(length: int, seed: int, epoch: int) -> list[int]:
    order = list(range(length))
    random.Random(digest("order", seed, epoch)).shuffle(order)
    return order


def pad(image: Tensor, multiple: int, value: float = 0.0) -> Tensor:
    """Pad ``[..., H, W]`` at the top and the right, up to multiples; undo with ``[..., -H:, :W]``."""
    height, width = image.shape[-2:]
    return F.pad(image, (0, -width % multiple, -height % multiple, 0), value=value)


_LEAST = 2.0  # pixels of disparity


def random_dot_pair(
    batch: int,
    height: int,
    width: int,
    max_disparity: float,
    generator: torch.Generator,
    kind: str = "pieces",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a batch of stereograms.

    Args:
        batch, height, width, generator: sizes, and what all random numbers are from.
        max_disparity: in pixels, inclusive, as the least, 2.
        kind: "pieces": a far background and three rectangles at integer disparities; "plane": one slanted plane;
            "zero": no disparity; "scene": slanted pieces with coarse and fine texture, and views of different
            brightness.

    Returns:
        left, right ``[B, 3, H, W]`` in 0..1, and the left view's disparity ``[B, H, W]``, infinite where unknown.
    """
    check_choice("kind", kind, ("pieces", "plane", "zero", "scene"))
    if not _LEAST <= max_disparity < width:
        raise ValueError(f"disparities from {_LEAST:g} to {max_disparity} do not fit a width of {width}")
    draw = _Draws(generator)
    shape = {"pieces": _pieces, "plane": _slanted, "scene": _scene, "zero": _flat}[kind]
    disparity = torch.stack([shape(draw, height, width, _LEAST, max_disparity) for _ in range(batch)])
    scene = kind == "scene"
    right, fresh = (
        _texture(draw, batch, height, width) if scene else draw.uniform(batch, 3, height, width) for _ in range(2)
    )
    inside = torch.arange(width) >= disparity
    left = torch.where(inside.unsqueeze(1), warp(right, disparity), fresh)
    if scene:
        left, right = _photograph(draw, left), _photograph(draw, right)
    return left, right, torch.where(inside, disparity, torch.inf)


class RandomDots:
    """A set of pairs from :func:`random_dot_pair`, each generated on access, always the same."""

    def __init__(
        self,
        length: int,
        height: int,
        width: int,
        max_disparity: float,
        kind: str = "pieces",
        seed: int = 0,
    ) -> None:
        if length < 1 or height < 1 or width < 1:
            raise ValueError(f"a set of {length} stereograms of {height}x{width} is empty")
        self._length, self._size, self._seed = length, (height, width), seed
        self._most, self._kind = max_disparity, kind
        self[0]  # raises if the arguments are invalid

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        if not 0 <= index < self._length:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(digest("dots", self._seed, index) >> 1)
        height, width = self._size
        left, right, disparity = random_dot_pair(1, height, width, self._most, generator, self._kind)
        return normalise(left[0]), normalise(right[0]), disparity[0]


class _Draws:
    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator)

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * float(self.uniform(1))

    def whole(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=self._generator))


def _box(draw: _Draws, height: int, width: int) -> tuple[slice, slice]:
    h, w = draw.whole(height // 5, height // 2), draw.whole(width // 8, width // 3)
    top, start = draw.whole(0, height - h), draw.whole(0, width - w)
    return slice(top, top + h), slice(start, start + w)


def _flat(draw: _Draws, height: int, width: int, low: float, high: float) -> Tensor:
    return torch.zeros(height, width)


def _pieces(draw: _Draws, height: int, width: int, low: float, high: float) -> Tensor:
    least, most = round(low), round(high)
    disparity = torch.full((height, width), float(draw.whole(least, least + (most - least) // 3)))
    for _ in range(3):
        disparity[_box(draw, height, width)] = draw.whole(least, most)
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
    batch = image.shape[0]
    gain, shift = 0.9 + 0.2 * draw.uniform(batch, 1, 1, 1), 0.1 * (draw.uniform(batch, 1, 1, 1) - 0.5)
    noise = 0.02 * (draw.uniform(*image.shape) - 0.5)
    return (gain * image + shift + noise).clamp(0, 1)


FORMATS = ("pfm", "pfm-negated", "kitti", "sintel", "array")


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise ValueError("reading pictures needs Pillow: pip install 'thinwire[stereo]'") from None
    return Image


def read_picture(path: str | Path) -> Tensor:
    """Read any picture file as ``[3, H, W]`` in 0..1; grey becomes three equal channels."""
    with _pillow().open(path) as picture:
        array = np.array(picture.convert("RGB"), dtype=np.float32)
    return torch.from_numpy(array / 255).permute(2, 0, 1).contiguous()


def read_pfm(path: str | Path) -> Tensor:
    """Read a portable float map: ``[H, W]``, or ``[3, H, W]``; rows from bottom to top, little-endian if scale < 0."""
    data = Path(path).read_bytes()
    head = re.match(rb"(P[fF])\s+(\d+)\s+(\d+)\s+([-+.\deE]+)\s", data)
    if head is None:
        raise ValueError(f"{path} is not a PFM file: it does not begin with Pf, a size and a scale")
    channels = 3 if head[1] == b"PF" else 1
    width, height, scale = int(head[2]), int(head[3]), float(head[4])
    count = width * height * channels
    if len(data) - head.end() < 4 * count:
        raise ValueError(f"{path} is cut short: {width}x{height} needs {4 * count} bytes of data")
    values = np.frombuffer(data, "<f4" if scale < 0 else ">f4", count, head.end()).astype(np.float32)
    image = torch.from_numpy(values.reshape(height, width, channels)[::-1].copy())
    return image.permute(2, 0, 1).contiguous() if channels == 3 else image[..., 0].contiguous()


def read_disparity(path: str | Path, kind: str = "") -> Tensor:
    """Read a disparity ``[H, W]`` in pixels, infinite where the file has no value.

    ``kind``: "pfm" (Scene Flow, Middlebury), "pfm-negated" (the FlyingThings3D subset stores -d), "kitti" (16-bit PNG),
    "sintel" (8-bit RGB PNG), "array" (.npy, .npz). "": by the suffix; a PNG is then of KITTI.
    """
    suffix = Path(path).suffix.lower()
    kind = kind or {".pfm": "pfm", ".png": "kitti", ".npy": "array", ".npz": "array"}.get(suffix, "")
    if kind not in FORMATS:
        raise ValueError(f"{path}: what kind of disparity is it? Name one of {', '.join(FORMATS)}")
    if kind.startswith("pfm"):
        found = read_pfm(path) * (-1 if kind.endswith("negated") else 1)
        missing = ~(found.isfinite() & (found > 0))
    elif kind == "array":
        loaded = np.load(path, allow_pickle=False)
        found = torch.from_numpy(np.asarray(loaded["arr_0"] if suffix == ".npz" else loaded, dtype=np.float32))
        missing = ~found.isfinite()
    else:
        with _pillow().open(path) as picture:
            raw = np.array(picture)
        if raw.ndim != (2 if kind == "kitti" else 3):
            raise ValueError(f"{path} is not a disparity of {kind}: its array has the shape {raw.shape}")
        if kind == "kitti":
            found = torch.from_numpy(raw.astype(np.float32) / 256)
            missing = found == 0
        else:
            r, g, b = (raw[..., c].astype(np.float32) for c in range(3))
            found = torch.from_numpy(4 * r + g / 64 + b / 16384)
            missing = torch.zeros_like(found, dtype=torch.bool)
    return torch.where(missing, torch.inf, found)


def middlebury_motorcycle(shrink: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return the Middlebury 2014 pair "motorcycle" that scikit-image carries.

    Args:
        shrink: make it so many times smaller: colours are averaged, disparities taken as they are and divided.

    Returns:
        left, right ``[3, H, W]`` in 0..1, and the left view's disparity ``[H, W]``, infinite where unknown.

    Raises:
        ValueError: scikit-image is not installed.
    """
    spec = importlib.util.find_spec("skimage")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("the motorcycle pair comes with scikit-image: pip install 'thinwire[stereo]'")
    folder = Path(spec.submodule_search_locations[0]) / "data"
    left, right = (read_picture(folder / f"motorcycle_{side}.png") for side in ("left", "right"))
    truth = read_disparity(folder / "motorcycle_disp.npz")
    if shrink == 1:
        return left, right, truth
    size = (left.shape[1] // shrink, left.shape[2] // shrink)
    smaller = F.interpolate(truth[None, None], size, mode="nearest")[0, 0] * size[1] / left.shape[2]
    left, right = (F.interpolate(x[None], size, mode="area")[0] for x in (left, right))
    return left, right, smaller


def read_list(path: str | Path) -> list[tuple[Path, Path, Path | None]]:
    """Read a list of files: lines of ``left right [disparity]``, relative to the list; # begins a comment."""
    root, found = Path(path).parent, []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        names = line.split("#")[0].split()
        if not names:
            continue
        if len(names) not in (2, 3):
            raise ValueError(f"{path}, line {number}: expected `left right [disparity]`, got {len(names)} names")
        files = [root / name for name in names]
        for file in files:
            if not file.exists():
                raise ValueError(f"{path}, line {number}: there is no {file}")
        found.append((files[0], files[1], files[2] if len(files) == 3 else None))
    if not found:
        raise ValueError(f"{path} lists no pairs")
    return found


class StereoFiles:
    """The pairs of a list. See :class:`~thinwire.supernet.stereo.data.Pairs`.

    Args:
        path: of the list, see :func:`~thinwire.supernet.stereo.data.read_list`; every line needs a disparity.
        crop: (height, width) of a random window, always the same for a sample; None: the whole picture, padded at the
            top and right to ``multiple``.
        kind: of the disparities, see :func:`~thinwire.supernet.stereo.data.read_disparity`.
        seed: for crops. multiple: for the padding.
    """

    def __init__(
        self,
        path: str | Path,
        crop: tuple[int, int] | None = None,
        kind: str = "",
        seed: int = 0,
        multiple: int = 24,
    ) -> None:
        self._files = read_list(path)
        if any(disparity is None for _, _, disparity in self._files):
            raise ValueError(f"{path} has lines without a disparity: training and evaluation need it")
        self._crop, self._kind, self._seed, self._multiple = crop, kind, seed, multiple

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        left_file, right_file, truth_file = self._files[index]
        assert truth_file is not None
        left, right, truth = read_picture(left_file), read_picture(right_file), read_disparity(truth_file, self._kind)
        if not left.shape[1:] == right.shape[1:] == truth.shape:
            raise ValueError(f"{left_file}: the views and the disparity differ in size")
        left, right = normalise(left), normalise(right)
        if self._crop is None:
            return pad(left, self._multiple), pad(right, self._multiple), pad(truth, self._multiple, torch.inf)
        height, width = self._crop
        if truth.shape[0] < height or truth.shape[1] < width:
            raise ValueError(f"{left_file} of {truth.shape[0]}x{truth.shape[1]} is smaller than the crop {self._crop}")
        rng = random.Random(digest("files", self._seed, index))
        top, start = rng.randint(0, truth.shape[0] - height), rng.randint(0, truth.shape[1] - width)
        window = (..., slice(top, top + height), slice(start, start + width))
        return left[window], right[window], truth[window]
