"""Norms of whole tensors, and the ratios that LARS and LAMB make of them: on a GPU in two launches for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.core.kernels.fused import Kernel, fused
from thinwire.core.kernels.tables import BLOCK, LaunchTable, alike, table

if TYPE_CHECKING:
    import triton.language as tl

_ROW = 1 << 12
"""Elements per partial sum: a single fp32 sum over millions of squares loses the sixth digit."""


@dataclass(frozen=True)
class Rule:
    """``coefficient * |w| / (|x| + decay * |w| + eps)``, within ``clamp``; 1 if ``|w|`` or ``|x|`` is 0."""

    coefficient: float = 1.0
    decay: float = 0.0
    eps: float = 0.0
    clamp: tuple[float, float] | None = None


@dataclass
class Layers:
    """Tensors under one rule: weights, and in the same shapes gradients (LARS) or updates (LAMB): the denominator.

    ``squares``: what :func:`squares` would return for both, if it is there already.
    """

    weights: list[Tensor] = field(default_factory=list)
    others: list[Tensor] = field(default_factory=list)
    rule: Rule = field(default_factory=Rule)
    squares: Tensor | None = None

    def part(self, indices: Sequence[int]) -> Layers:
        if len(indices) == len(self):
            return self
        return Layers([self.weights[i] for i in indices], [self.others[i] for i in indices], self.rule)

    def __len__(self) -> int:
        return len(self.weights)


def norms(tensors: list[Tensor]) -> Tensor:
    """Return each tensor's 2-norm, to the last digits of fp32, whatever the other tensors are: ``[len(tensors)]``."""
    if tensors[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(list(tensors)))
    return torch.stack([_norm(x) for x in tensors])


def _norm(x: Tensor) -> Tensor:
    if x.numel() <= _ROW:
        norm: Tensor = torch.linalg.vector_norm(x)
        return norm
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        x = x.permute(0, 2, 3, 1)  # the order in which the elements lie in memory
    flat = x.reshape(-1)
    whole = flat.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1)
    if whole < flat.numel():
        rows = torch.cat([rows, torch.linalg.vector_norm(flat[whole:]).view(1)])
    return _norm(rows)


def trust_ratios(layers: Layers) -> Tensor:
    """Return the ratio of each layer, ``[len(layers)]``, in their dtype. Zero norms are handled on the device."""
    return ratios(layers.weights, layers.others, layers.rule, layers.squares)


def _ratios(weights: list[Tensor], others: list[Tensor], rule: Rule, found: Tensor | None) -> Tensor:
    count = len(weights)
    both = norms([*weights, *others])
    weight, other = both[:count], both[count:]
    ratio = rule.coefficient * weight / (other + rule.decay * weight + rule.eps)
    if rule.clamp is not None:
        ratio = ratio.clamp(*rule.clamp)
    return torch.where((weight == 0) | (other == 0), 1.0, ratio)


@Kernel
def squares_kernel(rows, squares, LISTS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = rows + tl.program_id(0) * (4 + LISTS)
    size = tl.load(row + 3)
    for i in tl.static_range(LISTS):
        x = tl.load(row + 4 + i).to(tl.pointer_type(tl.float32))
        total = tl.zeros((BLOCK,), tl.float32)
        for begin in range(0, size, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            part = tl.load(x + at, at < size, 0.0)
            total += part * part
        tl.store(squares + tl.program_id(0) * LISTS + i, tl.sum(total.to(tl.float64)))


def squares(where: LaunchTable) -> Tensor:
    """Return each program's sum of squares of each list, fp64 ``[programs, lists]``. Launches."""
    lists = where.columns - 4
    found = where.rows.new_empty(where.programs, lists, dtype=torch.float64)
    squares_kernel(where.programs, where.rows, found, LISTS=lists, BLOCK=BLOCK)
    return found


@Kernel
def ratios_kernel(  # type: ignore[no-untyped-def]
    rows, columns, squares, ratios, coefficient, decay, eps, least, most, BLOCK: tl.constexpr
):
    row = rows + tl.program_id(0) * columns
    first, count = tl.load(row + 1), tl.load(row + 2)
    if tl.program_id(0) == first:  # one for each tensor
        mine, others = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
        for begin in range(0, count, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            mine += tl.load(squares + 2 * (first + at), at < count, 0.0)
            others += tl.load(squares + 2 * (first + at) + 1, at < count, 0.0)
        weight, other = tl.sqrt(tl.sum(mine)).to(tl.float32), tl.sqrt(tl.sum(others)).to(tl.float32)
        ratio = coefficient * weight / (other + decay * weight + eps)
        ratio = tl.where(ratio < least, least, tl.where(ratio > most, most, ratio))  # NaN stays
        tl.store(ratios + tl.load(row), tl.where((weight == 0) | (other == 0), 1.0, ratio))


@fused(_ratios, lambda weights, others, *_: alike(weights, others))
def ratios(weights: list[Tensor], others: list[Tensor], rule: Rule, found: Tensor | None) -> Tensor:
    """See ``trust_ratios``; ``found``: the squares, if they are known."""
    where = table(weights, others)
    found = squares(where) if found is None else found
    make = torch.empty if all(x.numel() for x in weights) else torch.ones  # those without elements have no program
    made = make(len(weights), device=weights[0].device)
    least, most = rule.clamp or (0.0, torch.inf)
    ratios_kernel(
        where.programs, where.rows, where.columns, found, made, rule.coefficient, rule.decay, rule.eps, least, most,
        BLOCK=BLOCK,
    )  # fmt: skip
    return made
