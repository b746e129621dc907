"""From a layer's inputs and output gradients to its two Kronecker factors: rows, second moments, scalings.

Source: Martens and Grosse 2015 (arXiv 1503.05671) for linear layers, Grosse and Martens 2016 (arXiv 1602.01407) for
convolutions. With B examples, T positions of each and b = 1 where there is a bias, a row of *a* is an input position
with a one behind it, ``[B T, d_A]``, and a row of *g* the gradient of one example's loss at an output position,
``[B T, d_G]``; then ``A = sum a a' / B`` and ``G = sum g g' / (B T)``. Those are the *reference* scaling.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.program import working_dtype

SCALINGS = ("reference", "authors", "kaisa")
TOKENS = ("expand", "reduce")


def input_rows(module: nn.Module, x: Tensor, tokens: str = "expand") -> Tensor:
    """Rows of *a* without the ones, ``[rows, d_A - b]``, in the working dtype.

    Args:
        module: ``nn.Linear`` or ``nn.Conv2d``.
        x: its input: ``[B, ..., in]``, ``[in]``, or ``[B, cin, H, W]``, ``[cin, H, W]``.
        tokens: of linear layers: "expand": a row for each position; "reduce": one for each example, the mean.
    """
    x = x.detach().to(working_dtype(x.dtype))
    if isinstance(module, nn.Conv2d):
        images = x if x.dim() == 4 else x.unsqueeze(0)
        return patches(module, images).mT.reshape(-1, module.weight[0].numel())
    if tokens == "reduce" and x.dim() > 2:
        return x.flatten(1, -2).mean(1)
    return x.reshape(-1, x.shape[-1])


def gradient_rows(module: nn.Module, g: Tensor, tokens: str = "expand") -> Tensor:
    """Rows of *g*, ``[rows, d_G]``, in the working dtype; "reduce": the sum over an example's positions."""
    g = g.detach().to(working_dtype(g.dtype))
    if isinstance(module, nn.Conv2d):
        images = g if g.dim() == 4 else g.unsqueeze(0)
        return images.flatten(2).mT.reshape(-1, images.shape[1])
    if tokens == "reduce" and g.dim() > 2:
        return g.flatten(1, -2).sum(1)
    return g.reshape(-1, g.shape[-1])


def examples_in(module: nn.Module, x: Tensor) -> int:
    """B: the first dimension, 1 where there is no batch."""
    single = 3 if isinstance(module, nn.Conv2d) else 1
    return 1 if x.dim() == single else x.shape[0]


def patches(conv: nn.Conv2d, images: Tensor) -> Tensor:
    """What each output position sees, ``[B, cin kh kw, positions]``: any stride, padding and dilation."""
    (kh, kw), (dh, dw) = conv.kernel_size, conv.dilation
    if conv.padding == "same":  # torch puts the odd one behind
        high, wide = dh * (kh - 1), dw * (kw - 1)
        padding = [wide // 2, wide - wide // 2, high // 2, high - high // 2]
    elif isinstance(conv.padding, str):  # "valid"
        padding = [0, 0, 0, 0]
    else:
        ph, pw = conv.padding
        padding = [pw, pw, ph, ph]
    if any(padding):
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        images = F.pad(images, padding, mode=mode)
    return F.unfold(images, conv.kernel_size, dilation=conv.dilation, stride=conv.stride)


def second_moment(rows: Tensor, *, ones: bool) -> Tensor:
    """``sum r r'`` over rows ``[n, d]``: ``[d, d]``, or ``[d+1, d+1]`` as if every row had a one behind it."""
    if ones:
        rows = torch.cat([rows, rows.new_ones(rows.shape[0], 1)], 1)
    return rows.mT @ rows


def input_scale(scaling: str, examples: int, rows: int) -> float:
    """What ``sum a a'`` is multiplied by to become A.

    Args:
        scaling: "reference": 1/B; "authors" (shyhuai/kfac_pytorch, lzhangbv/kfac_pytorch): also by 1/T^2; "kaisa"
            (gpauloski/kfac-pytorch): by 1/T^3.
        examples: B. rows: B T.
    """
    positions = rows / examples
    factor: float = {"reference": 1.0, "authors": positions**-2, "kaisa": positions**-3}[scaling]
    return factor / examples


def gradient_scale(scaling: str, examples: int, rows: int) -> float:
    """What ``sum g g'``, of the gradients of each example's own loss, is multiplied by to become G.

    "reference": 1/(B T); "authors": T^2 times that; "kaisa": 1/(B^2 T^2) times that, so its damping depends on B.
    """
    positions = rows / examples
    factor: float = {"reference": 1.0, "authors": positions**2, "kaisa": (examples * positions) ** -2.0}[scaling]
    return factor / rows
