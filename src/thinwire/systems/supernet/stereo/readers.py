"""Published stereo data from files: disparities of four data sets, pictures, lists of files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
    """Read a portable float map, the format of Scene Flow: ``[H, W]``, or ``[3, H, W]`` with colours.

    In the file, rows are stored from bottom to top; a negative scale means little-endian.

    Raises:
        ValueError: the file is not a PFM file, or it is incomplete.
    """
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

    Args:
        path: of the file.
        kind: "pfm" (Scene Flow, Middlebury), "pfm-negated" (the FlyingThings3D subset stores -d), "kitti" (16-bit PNG),
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


def read_list(path: str | Path) -> list[tuple[Path, Path, Path | None]]:
    """Read a list of files: lines of ``left right [disparity]``, relative to the list; # begins a comment.

    Raises:
        ValueError: a line has another number of names, a file is missing, or the list is empty.
    """
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
