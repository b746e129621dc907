"""The layers' trust ratios: one function of norms for LARS, LAMB and the code that shares it among ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

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
    """Tensors under one rule.

    Attributes:
        weights: one per layer, working dtype.
        others: the tensors in the denominator: gradients (LARS) or updates (LAMB), same shapes.
        rule: of these layers.
    """

    weights: list[Tensor] = field(default_factory=list)
    others: list[Tensor] = field(default_factory=list)
    rule: Rule = field(default_factory=Rule)

    def part(self, indices: Sequence[int]) -> Layers:
        """Return some of the layers."""
        return Layers([self.weights[i] for i in indices], [self.others[i] for i in indices], self.rule)

    def __len__(self) -> int:
        return len(self.weights)


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of each tensor, ``[len(tensors)]``, on their device, without waiting for it.

    Correct to the last digits of fp32 for any size. A tensor's norm does not depend on the other tensors.
    """
    if tensors[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(list(tensors)))
    return torch.stack([_norm(x) for x in tensors])


def _norm(x: Tensor) -> Tensor:
    if x.numel() <= _ROW:
        norm: Tensor = torch.linalg.vector_norm(x)
        return norm
    flat = _flat(x)
    whole = flat.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1)
    if whole < flat.numel():
        rows = torch.cat([rows, torch.linalg.vector_norm(flat[whole:]).view(1)])
    return _norm(rows)


def _flat(x: Tensor) -> Tensor:
    """Return all elements as 1-D, in the order in which they lie in memory."""
    if x.is_contiguous():
        return x.view(-1)
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return x.permute(0, 2, 3, 1).reshape(-1)
    return x.reshape(-1)


def trust_ratios(layers: Layers) -> Tensor:
    """Return the ratio of each layer, ``[len(layers)]``, in their dtype. Zero norms are handled on the device.

    Raises:
        ValueError: there is no layer.
    """
    if not len(layers):
        raise ValueError("trust_ratios needs at least one layer")
    rule, count = layers.rule, len(layers)
    both = norms([*layers.weights, *layers.others])
    weight, other = both[:count], both[count:]
    ratio = rule.coefficient * weight / (other + rule.decay * weight + rule.eps)
    if rule.clamp is not None:
        ratio = ratio.clamp(*rule.clamp)
    return torch.where((weight == 0) | (other == 0), 1.0, ratio)


def replicated(blocks: Sequence[Layers]) -> list[Tensor]:
    """Return the ratios of several rules' layers, all computed on this rank."""
    return [trust_ratios(block) for block in blocks]
