"""Files that are whole or not there: safetensors and JSON, written under another name, flushed, renamed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor


def safetensors_torch() -> Any:
    """The module ``safetensors.torch``.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import safetensors.torch
    except ImportError as error:
        raise ValueError(
            "client states and checkpoints are kept with safetensors: pip install 'thinwire[federated]'"
        ) from error
    return safetensors.torch


def pack(tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors as one safetensors file, in memory."""
    kept = {name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}
    packed: bytes = safetensors_torch().save(kept)
    return packed


def unpack(data: bytes) -> dict[str, Tensor]:
    """The counterpart of ``pack``."""
    found: dict[str, Tensor] = safetensors_torch().load(data)
    return found


def write(path: Path, data: bytes, *, flush: bool = True) -> None:
    """Write a file, whole or not at all. ``flush``: it also survives a loss of power, from here on."""
    partial = path.with_name(f".partial-{os.getpid()}-{path.name}")
    try:
        with partial.open("wb") as file:
            file.write(data)
            if flush:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


def write_json(path: Path, content: Any) -> None:
    """Write JSON, whole or not at all."""
    write(path, json.dumps(content).encode())
