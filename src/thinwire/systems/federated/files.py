"""Tensors as safetensors, in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def safetensors_torch() -> Any:
    """Return the module ``safetensors.torch``.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import safetensors.torch
    except ImportError as error:
        raise ValueError(
            "client states and checkpoints are stored with safetensors: pip install 'thinwire[federated]'"
        ) from error
    return safetensors.torch


def pack(tensors: Mapping[str, Tensor]) -> bytes:
    """Return tensors as the bytes of one safetensors file."""
    kept = {name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}
    packed: bytes = safetensors_torch().save(kept)
    return packed


def unpack(data: bytes) -> dict[str, Tensor]:
    """Return the tensors that ``pack`` packed."""
    found: dict[str, Tensor] = safetensors_torch().load(data)
    return found
