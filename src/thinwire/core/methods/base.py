"""What methods share: the all-reduce in its two forms, the dense average, verdicts, option checks."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from thinwire.core.methods.exchanges import all_reduce_by, padded
from thinwire.core.pricing.merge import Merge
from thinwire.core.program import AllGather, Bucket, ReduceScatter, Slot, State, working_dtype


def check_fusion(fusion: Any, *, sparse: bool = False) -> None:
    """Raise ``ValueError`` unless ``fusion`` is a known word, a number of MiB, or a ``Merge``.

    ``sparse``: the method selects entries, so the published rule that applies is OMGS, not MG-WFBP.
    """
    words = ("auto", "none", "single", "optimal", "omgs" if sparse else "mgwfbp", "tune")
    if isinstance(fusion, Merge):
        return
    if isinstance(fusion, str):
        if fusion not in words:
            raise ValueError(f"fusion={fusion!r} is unknown; use a number of MiB or one of {', '.join(words)}")
    elif isinstance(fusion, bool) or not isinstance(fusion, (int, float)) or not fusion > 0:
        raise ValueError(f"fusion={fusion!r} must be a positive number of MiB or one of {', '.join(words)}")


def check_count(name: str, value: Any, least: int = 0) -> None:
    """Raise ``ValueError`` unless an option is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")


def check_flag(name: str, value: Any) -> None:
    """Raise ``ValueError`` unless an option is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False")


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise ``ValueError`` unless an option is one of a few values."""
    if isinstance(value, bool) or value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; use one of {', '.join(map(repr, choices))}")


def all_reduce(
    x: Tensor, state: State, *, deterministic: bool, collective: str = "flat"
) -> Generator[Any, Tensor, Tensor]:
    """Sum over the world. ``deterministic=True``: in rank order, by reduce-scatter and all-gather. Owns ``x``.

    ``collective``: otherwise, the sub-program of :mod:`~thinwire.methods.exchanges` to use.
    """
    if not deterministic:
        return (yield from all_reduce_by(collective, x, state))
    size = x.numel()
    shard = yield ReduceScatter(padded(x, state.size))
    everyone = yield AllGather(shard)
    return everyone.reshape(-1)[:size].view(x.shape)


def all_finite(x: Tensor) -> Tensor:
    """Return whether every element is finite, as a 0-dim bool tensor; one pass, no temporary, no host read."""
    if x.numel() == 0 or x.device.type == "meta":
        return torch.ones((), dtype=torch.bool, device=x.device)
    low, high = torch.aminmax(x)  # both are NaN if any element is
    return torch.maximum(-low, high) < torch.inf


def split_message(messages: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split messages [P, bytes] into ``count`` scales each, [P, count], and the codes after them, [P, bytes]."""
    head = count * dtype.itemsize
    return messages[:, :head].reshape(-1).view(dtype).view(-1, count), messages[:, head:]


def poison(finite: Tensor, value: float, dtype: torch.dtype) -> Tensor:
    """Return ``value``, or NaN if the verdict is False, so that every scaler skips the step."""
    if finite.device.type == "meta":
        return torch.empty((), dtype=dtype, device="meta")
    return torch.where(finite, value, torch.nan).to(dtype)


def own_memory(slot: Slot) -> Tensor | None:
    """Return the gradient's memory if the result can be made in it (no loss scale, working dtype, contiguous), or None.

    Whatever is written there is delivered. Nothing may read the gradient afterwards.
    """
    target = slot.value if slot.result is None else slot.result
    if slot.scale is not None or target is None or target.dtype != working_dtype(slot.dtype):
        return None
    if not target.is_contiguous():
        return None
    slot.result = target
    return target


def average_flat(
    bucket: Bucket, state: State, *, deterministic: bool, watch: bool = False, collective: str = "flat"
) -> Generator[Any, Tensor, None]:
    """Run the program of S-SGD; ``watch=True``: with a verdict, for methods that keep residuals in other buckets.

    Divides before the sum, as DDP does: that costs no pass of its own, and 16 bits cannot overflow.
    """
    if bucket.numel == 0:
        return
    total = yield from all_reduce(bucket.shares(state.size), state, deterministic=deterministic, collective=collective)
    if watch:
        state.verdict(all_finite(total))
    bucket.write(total)
