"""Pack a sparse vector into one message: k values, padded to 4 bytes, then k int32 indices, in one uint8 tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.core.kernels.fused import Kernel, fused
from thinwire.core.kernels.select.ranked import INFINITE, NAN, Ranked

if TYPE_CHECKING:
    import triton.language as tl

WIRES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_BLOCK = 512  # pairs that a program reads at once
_SPAN = 4096  # elements of a sum that a program makes


def wire_dtype(wire: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of values in a message: "fp32" keeps fp64 for fp64 gradients."""
    return dtype if wire == "fp32" and dtype == torch.float64 else WIRES[wire]


def message_bytes(k: int, dtype: torch.dtype) -> int:
    return _value_bytes(k, dtype) + 4 * k


def to_wire(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round values to the message's dtype; finite values beyond the range of 16 bits become its largest."""
    if dtype.itemsize == 2:
        limit = torch.finfo(dtype).max
        values = torch.where(values.isfinite(), values.clamp(-limit, limit), values)
    return values.to(dtype)


def pack(values: Tensor, indices: Tensor) -> Tensor:
    """Pack values (already rounded) and int64 indices below 2^31, ``[..., k]`` -> uint8 ``[..., message_bytes]``."""
    body = values.contiguous().view(torch.uint8)
    gap = _value_bytes(values.shape[-1], values.dtype) - body.shape[-1]
    parts = [body, body.new_zeros(*body.shape[:-1], gap)] if gap else [body]
    return torch.cat([*parts, indices.to(torch.int32).view(torch.uint8)], -1)


def unpack(message: Tensor, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Unpack messages ``[..., bytes]`` -> (values ``[..., k]`` in ``dtype``, indices ``[..., k]`` int64)."""
    cut = _value_bytes(k, dtype)
    message = message[..., : cut + 4 * k].contiguous()
    if message.shape[-1] % dtype.itemsize == 0:
        values = message.view(dtype)[..., :k]
    else:  # fp64 between odd numbers of indices
        values = message[..., :cut].reshape(-1).view(dtype).view(*message.shape[:-1], k)
    return values, message.view(torch.int32)[..., cut // 4 :].long()


def add_pairs(out: Tensor, values: Tensor, indices: Tensor) -> Tensor:
    """Add ``[P, k]`` pairs to ``out`` ``[d]``, rank by rank, so that bits do not depend on the device's order."""
    for v, i in zip(values.unbind(), indices.unbind()):
        out.index_add_(0, i, v.to(out.dtype))
    return out


def _send(a: Tensor, indices: Tensor, finite: Tensor, wire: torch.dtype) -> Tensor:
    """Pack the entries of ``a`` ``[d]`` at ``indices``, all NaN unless ``finite``; in ``a``, leave what is not sent."""
    if a.is_meta:
        return torch.empty(message_bytes(indices.numel(), wire), dtype=torch.uint8, device="meta")
    values = a[indices]
    sent = to_wire(torch.where(finite, values, torch.nan), wire)
    a[indices] = values - sent.to(a.dtype)
    return pack(sent, indices)


@Kernel
def send_kernel(  # type: ignore[no-untyped-def]
    a, indices, finite, sent, places, k: int, padded: int, LIMIT: tl.constexpr, WIDTH: tl.constexpr
):
    j = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = j < k
    at = tl.load(indices + j, inside, 0)
    value = tl.load(a + at, inside, 0)
    said = tl.where(tl.load(finite), value, float("nan"))
    if LIMIT > 0:
        said = tl.where(tl.abs(said) < float("inf"), tl.minimum(tl.maximum(said, -LIMIT), LIMIT), said)
    said = said.to(sent.dtype.element_ty)
    tl.store(sent + j, said, j < padded)
    tl.store(places + j, at.to(tl.int32), inside)
    tl.store(a + at, value - said.to(tl.float32), inside)


@fused(_send)
def send(a: Tensor, indices: Tensor, finite: Tensor, wire: torch.dtype) -> Tensor:
    k = indices.numel()
    message = torch.empty(message_bytes(k, wire), dtype=torch.uint8, device=a.device)
    cut = _value_bytes(k, wire)
    send_kernel(
        -(-k // _BLOCK), a, indices, finite, message[:cut].view(wire), message[cut:].view(torch.int32), k,
        cut // wire.itemsize, LIMIT=torch.finfo(wire).max if wire.itemsize == 2 else 0.0, WIDTH=_BLOCK,
    )  # fmt: skip
    return message


def _average(
    out: Tensor, messages: Tensor, k: int, wire: torch.dtype, ranks: int, scale: Tensor | None = None
) -> Tensor:
    """Overwrite ``out`` ``[d]`` with the sum of messages ``[P, bytes]``, times ``scale``, over ``ranks``.

    A message is all NaN if its sender found anything that is not finite; then ``out`` is NaN, and False is returned.
    Indices of -1 are padding. On a GPU they must ascend, as they do from :func:`~thinwire.kernels.select.top_k` there.
    """
    if out.is_meta:
        return torch.empty((), dtype=torch.bool, device="meta")
    values, indices = unpack(messages, k, wire)
    finite = values[:, 0].isfinite().all()
    values, indices = values.to(out.dtype), indices.clamp_(min=0)
    out.fill_(torch.where(finite, 0.0, torch.nan).to(out.dtype))
    add_pairs(out, values if scale is None else values * scale, indices)
    if indices.numel() < out.numel():
        touched = indices.reshape(-1)
        out[touched] = out[touched] / ranks
    else:
        out.div_(ranks)
    return finite


@Kernel
def reach_kernel(indices, row, k, steps, place, there):  # type: ignore[no-untyped-def]
    """In each rank's indices, the place of the first that is not below ``place``."""
    low, high = tl.zeros_like(row).to(tl.int32), tl.zeros_like(row).to(tl.int32) + k
    for _ in range(steps):
        middle = (low + high) // 2
        below = tl.load(indices + row + middle, there & (low < high), 0) < place
        low, high = tl.where(below & (low < high), middle + 1, low), tl.where(below, high, middle)
    return low


@Kernel
def average_kernel(  # type: ignore[no-untyped-def]
    out, values, indices, scale, finite, size: int, k: int, steps: int, parts: int, ranks: int,
    value_row: int, index_row: int,
    PARTS: tl.constexpr, SPAN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A program adds all pairs of its span, rank by rank, so that bits do not depend on the device's order."""
    first = tl.program_id(0).to(tl.int64) * SPAN
    part = tl.arange(0, PARTS)
    there = part < parts
    value_rows, index_rows = part.to(tl.int64) * value_row, part.to(tl.int64) * index_row
    said = tl.load(values + value_rows, there, 0).to(tl.float32)
    good = tl.min((tl.abs(said) < float("inf")).to(tl.int32))
    if tl.program_id(0) == 0:
        tl.store(finite, good > 0)
    begins = reach_kernel(indices, index_rows, k, steps, first, there)
    ends = reach_kernel(indices, index_rows, k, steps, first + SPAN, there)
    empty = tl.where(good > 0, 0.0, float("nan"))
    at = first + tl.arange(0, SPAN)
    tl.store(out + at, tl.zeros((SPAN,), tl.float32) + empty, at < size)
    for p in range(parts):
        tl.debug_barrier()  # the pairs of two ranks may meet
        end = tl.sum(tl.where(part == p, ends, 0))
        its_values = values + tl.sum(tl.where(part == p, value_rows, 0))
        its_indices = indices + tl.sum(tl.where(part == p, index_rows, 0))
        for begin in range(tl.sum(tl.where(part == p, begins, 0)), end, WIDTH):
            j = begin + tl.arange(0, WIDTH)
            index = tl.load(its_indices + j, j < end, 0)
            value = tl.load(its_values + j, j < end, 0).to(tl.float32)
            if scale is not None:
                value *= tl.load(scale)
            tl.store(out + index, tl.load(out + index, j < end, 0) + value, j < end)
    tl.debug_barrier()
    total = tl.load(out + at, at < size, 0)
    tl.store(out + at, tl.div_rn(total, tl.zeros_like(total) + ranks), at < size)


@fused(_average)
def average(
    out: Tensor, messages: Tensor, k: int, wire: torch.dtype, ranks: int, scale: Tensor | None = None
) -> Tensor:
    messages, cut = messages.contiguous(), _value_bytes(k, wire) // 4
    parts, words = len(messages), messages.view(torch.int32)
    finite = torch.empty((), dtype=torch.bool, device=out.device)
    average_kernel(
        -(-out.numel() // _SPAN), out, messages.view(wire), words[:, cut:], scale, finite, out.numel(), k,
        k.bit_length(), parts, ranks, messages.shape[1] // wire.itemsize, words.shape[1],
        PARTS=1 << (parts - 1).bit_length(), SPAN=_SPAN, WIDTH=_BLOCK, enable_fp_fusion=False,
    )  # fmt: skip
    return finite


def by_index(values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    if indices.device.type == "meta":
        return values, indices
    indices, order = torch.sort(indices)
    return values[order], indices


def merge_pairs(mine: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the k largest entries of the sum of two sparse vectors of k pairs each: gTop-k's operator.

    Both are (values, indices) in ascending order of distinct indices; swapping them gives the same sums, bit for bit.
    Returns values and indices, chosen by :func:`largest`, in that order, and each one's place in ``mine``, else -1.
    """
    k = mine[1].numel()
    if mine[1].device.type == "meta":
        return mine[0].new_empty(k), mine[1].new_empty(k), mine[1].new_empty(k)
    values, indices, places = union(*mine, *other)
    kept = largest(values, indices, k)
    return values[kept], indices[kept], places[kept]


def _union(
    values: Tensor, indices: Tensor, other_values: Tensor, other_indices: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of two sparse vectors of k pairs each, 2k pairs: values, indices, and places in the first, or -1.

    After the sum of two entries of one index follows a pair with index -1.
    """
    k = indices.numel()
    indices, order = torch.sort(torch.cat([indices, other_indices]), stable=True)
    values = torch.cat([values, other_values])[order]
    twin = torch.zeros_like(indices, dtype=torch.bool)  # the second of two equal indices
    torch.eq(indices[1:], indices[:-1], out=twin[1:])
    values[:-1] += torch.where(twin[1:], values[1:], 0)
    return values, torch.where(twin, -1, indices), torch.where(order < k, order, -1)


@Kernel
def union_kernel(  # type: ignore[no-untyped-def]
    values, indices, other_values, other_indices, sums, found, places, k: int, steps: int, WIDTH: tl.constexpr
):
    j = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside, row = j < k, tl.zeros((WIDTH,), tl.int64)
    index = tl.load(indices + j, inside, 0)
    place = reach_kernel(other_indices, row, k, steps, index, inside)
    twin = tl.load(other_indices + place, inside & (place < k), -1) == index
    value = tl.load(values + j, inside, 0) + tl.where(twin, tl.load(other_values + place, inside & twin, 0), 0)
    tl.store(sums + j + place, value, inside)
    tl.store(found + j + place, index, inside)
    tl.store(places + j + place, j.to(tl.int64), inside)
    index = tl.load(other_indices + j, inside, 0)
    place = reach_kernel(indices, row, k, steps, index + 1, inside)
    twin = tl.load(indices + place - 1, inside & (place > 0), -1) == index
    value = tl.load(other_values + j, inside, 0)
    tl.store(sums + j + place, tl.where(value == 0, 0.0, value), inside)  # as -0.0 + 0 on the other side
    tl.store(found + j + place, tl.where(twin, -1, index), inside)
    tl.store(places + j + place, row - 1, inside)


@fused(_union)
def union(
    values: Tensor, indices: Tensor, other_values: Tensor, other_indices: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    k = indices.numel()
    sums, found, places = values.new_empty(2 * k), indices.new_empty(2 * k), indices.new_empty(2 * k)
    union_kernel(
        -(-k // _BLOCK), values, indices, other_values, other_indices, sums, found, places, k, k.bit_length(),
        WIDTH=_BLOCK,
    )  # fmt: skip
    return sums, found, places


def _largest(values: Tensor, indices: Tensor, k: int) -> Tensor:
    """Return the places of the k largest pairs by (magnitude, place), ascending.

    NaN is the largest, index -1 the smallest. Fixed shapes and no sort: equal input gives equal output everywhere.
    """
    size = torch.where(indices < 0, -1.0, torch.where(values.isnan(), torch.inf, values.abs()))
    limit = torch.topk(size, k, sorted=False).values.amin()
    above, equal = size > limit, size == limit
    return torch.nonzero_static(above | (equal & (equal.cumsum(0) <= k - above.sum())), size=k).squeeze(1)


@Kernel
def padded_keys_kernel(bits, indices, keys, n: int, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys as for a selection, 1 higher; of padding 0."""
    j = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    key = tl.minimum(tl.load(bits + j, j < n, 0) & 0x7FFFFFFF, INFINITE) + 1
    tl.store(keys + j, tl.where(tl.load(indices + j, j < n, 0) < 0, 0, key), j < n)


@fused(_largest)
def largest(values: Tensor, indices: Tensor, k: int) -> Tensor:
    n, keys = indices.numel(), torch.empty_like(values)
    padded_keys_kernel(
        -(-n // _BLOCK), values.view(torch.int32), indices, keys.view(torch.int32), n, WIDTH=_BLOCK
    )  # fmt: skip
    return Ranked(keys, (k,)).take(k, 0.0, "circular", most=NAN)


def contains(indices: Tensor, wanted: Tensor) -> Tensor:
    """Return whether each of ``wanted`` is among ``indices``, which are in ascending order."""
    if indices.device.type == "meta":
        return torch.empty(wanted.shape, dtype=torch.bool, device="meta")
    return indices[torch.searchsorted(indices, wanted).clamp_(max=indices.numel() - 1)] == wanted


def _value_bytes(k: int, dtype: torch.dtype) -> int:
    return -(-k * dtype.itemsize // 4) * 4
