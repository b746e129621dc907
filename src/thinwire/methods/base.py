"""What methods share: the all-reduce in its two forms, the dense average, option checks."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from thinwire.program import AllGather, AllReduce, Bucket, ReduceScatter, State


def check_merge(merge: Any) -> None:
    """Raise ``ValueError`` unless ``merge`` is a word of the merge vocabulary or a positive number of MiB."""
    words = ("auto", "none", "single")
    if isinstance(merge, str):
        if merge not in words:
            raise ValueError(f"merge={merge!r} is unknown; use a number of MiB or one of {', '.join(words)}")
    elif isinstance(merge, bool) or not isinstance(merge, (int, float)) or not merge > 0:
        raise ValueError(f"merge={merge!r} must be a positive number of MiB or one of {', '.join(words)}")


def all_reduce(x: Tensor, state: State, *, ordered: bool) -> Generator[Any, Tensor, Tensor]:
    """Sum over the world; ``ordered=True``: in rank order, as reduce-scatter and all-gather, same bytes. Owns ``x``."""
    if not ordered:
        return (yield AllReduce(x))
    size = x.numel()
    padding = -size % state.size
    padded = torch.cat([x.reshape(-1), x.new_zeros(padding)]) if padding else x.reshape(-1)
    shard = yield ReduceScatter(padded)
    everyone = yield AllGather(shard)
    return everyone.reshape(-1)[:size].view(x.shape)


def average_flat(bucket: Bucket, state: State, *, ordered: bool) -> Generator[Any, Tensor, None]:
    """The program of S-SGD."""
    flat = bucket.flat
    if flat.element_size() < 4:  # 16 bit: divide first, then the sum cannot overflow
        total = yield from all_reduce(flat.div_(state.size), state, ordered=ordered)
        bucket.write(total)
    else:
        total = yield from all_reduce(flat, state, ordered=ordered)
        bucket.write(total.div_(state.size))
