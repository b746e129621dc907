"""Samples as bytes and back: nested dicts and tuples of tensors, arrays, bytes and plain numbers, with safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

_TREE = "tree"
_WHAT = "a sample can hold dicts with str keys, tuples, tensors, numpy arrays, bytes, int, float and str"


def require_safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("a data cache stores samples with safetensors: pip install 'thinwire[data]'") from error
    return safetensors.torch


def pack(value: Any) -> bytes:
    """Pack a sample as one safetensors file: its tensors, and its structure as JSON in a tensor of bytes.

    Equal samples give equal bytes. Subclasses are refused, as they mean something that would be lost.
    """
    tensors: dict[str, Tensor] = {}
    tree = json.dumps(_flatten(value, tensors, "sample"))
    tensors[_TREE] = _from_bytes(tree.encode())
    try:
        packed: bytes = require_safetensors().save(tensors)
    except (KeyError, ValueError) as error:
        kinds = ", ".join(sorted({str(t.dtype) for t in tensors.values()}))
        raise TypeError(f"safetensors cannot store a tensor of one of the dtypes {kinds}: convert it") from error
    return packed


def unpack(packed: bytes) -> Any:
    """Restore what :func:`pack` was given; all memory is new, so it may be changed in place."""
    tensors = require_safetensors().load(packed)
    return _restore(json.loads(_to_bytes(tensors[_TREE])), tensors)


def size_of(value: Any) -> int:
    """Return the bytes of the tensors, arrays, bytes and text in a sample; other objects count as nothing."""
    total = 0
    for leaf in leaves(value):
        if isinstance(leaf, (Tensor, np.ndarray, np.generic)):
            total += int(leaf.nbytes)
        elif isinstance(leaf, (bytes, bytearray)):
            total += len(leaf)
        elif isinstance(leaf, str):
            total += len(leaf.encode(errors="surrogatepass"))
        elif isinstance(leaf, (int, float)):
            total += 8
    return total


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for entry in value.values():
            yield from leaves(entry)
    elif isinstance(value, (tuple, list)):
        for entry in value:
            yield from leaves(entry)
    else:
        yield value


def _flatten(value: Any, tensors: dict[str, Tensor], where: str) -> list[Any]:
    def keep(kind: str, tensor: Tensor) -> list[Any]:
        tensors[str(len(tensors))] = tensor
        return [kind, str(len(tensors) - 1)]

    if type(value) is dict and all(type(key) is str for key in value):
        return ["dict", {key: _flatten(entry, tensors, f"{where}[{key!r}]") for key, entry in value.items()}]
    if type(value) is tuple:
        return ["tuple", [_flatten(entry, tensors, f"{where}[{i}]") for i, entry in enumerate(value)]]
    if type(value) is Tensor:
        if value.layout is not torch.strided:
            raise TypeError(f"{where} has layout {value.layout}, which cannot be stored: make it dense")
        # a clone: safetensors refuses tensors that share memory, and views would store their whole base
        return keep("tensor", value.detach().cpu().clone(memory_format=torch.contiguous_format))
    if type(value) in (np.ndarray, np.memmap) or isinstance(value, np.generic):
        try:
            stored = torch.from_numpy(np.array(value, value.dtype.newbyteorder("="), order="C"))
        except TypeError as error:
            raise TypeError(f"{where} has dtype {value.dtype}, which cannot be stored: convert it") from error
        return keep("array" if isinstance(value, np.ndarray) else "scalar", stored)
    if type(value) is bytes:
        return keep("bytes", _from_bytes(value))
    if type(value) in (int, float, str, bool):
        return ["plain", value]
    hint = "; turn an image into a tensor or an array" if hasattr(value, "getpixel") else ""
    raise TypeError(f"{where} is a {type(value).__name__}, which cannot be stored: {_WHAT}{hint}")


def _restore(node: list[Any], tensors: dict[str, Tensor]) -> Any:
    kind, content = node
    if kind == "dict":
        return {key: _restore(entry, tensors) for key, entry in content.items()}
    if kind == "tuple":
        return tuple(_restore(entry, tensors) for entry in content)
    if kind == "plain":
        return content
    tensor = tensors[content]
    if kind == "tensor":
        return tensor
    if kind == "bytes":
        return _to_bytes(tensor)
    array = tensor.numpy()
    return array if kind == "array" else array[()]


def _from_bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _to_bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()
