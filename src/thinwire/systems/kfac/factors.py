"""From a layer's inputs and output gradients to its two Kronecker factors: rows, second moments, scalings.

Source: Martens and Grosse 2015 (arXiv 1503.05671) for linear layers, Grosse and Martens 2016 (arXiv 1602.01407) for
convolutions. With B examples, T positions of each, and b = 1 if there is a bias (else 0), a row of *a* is an input
position followed by a one if b = 1, ``[B T, d_A]``, and a row of *g* is the gradient of one example's loss at an output
position, ``[B T, d_G]``; then ``A = sum a a' / B`` and ``G = sum g g' / (B T)``. This is the *reference* scaling.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.core.program import working_dtype

SCALINGS = ("reference", "authors", "kaisa")
TOKENS = ("expand", "reduce")


def input_rows(module: nn.Module, x: Tensor, tokens: str = "expand") -> Tensor:
    """Return the rows of *a* without the ones, ``[rows, d_A - b]``, in the working dtype.

    Args:
        module: ``nn.Linear`` or ``nn.Conv2d``.
        x: its input: ``[B, ..., in]``, ``[in]``, or ``[B, cin, H, W]``, ``[cin, H, W]``.
        tokens: for linear layers: "expand": one row per position; "reduce": one row per example, the mean.
    """
    x = x.detach().to(working_dtype(x.dtype))
    if isinstance(module, nn.Conv2d):
        images = x if x.dim() == 4 else x.unsqueeze(0)
        return patches(module, images).mT.reshape(-1, module.weight[0].numel())
    if tokens == "reduce" and x.dim() > 2:
        return x.flatten(1, -2).mean(1)
    return x.reshape(-1, x.shape[-1])


def gradient_rows(module: nn.Module, g: Tensor, tokens: str = "expand") -> Tensor:
    """Return the rows of *g*, ``[rows, d_G]``, in the working dtype; "reduce": the sum over an example's positions."""
    g = g.detach().to(working_dtype(g.dtype))
    if isinstance(module, nn.Conv2d):
        images = g if g.dim() == 4 else g.unsqueeze(0)
        return images.flatten(2).mT.reshape(-1, images.shape[1])
    if tokens == "reduce" and g.dim() > 2:
        return g.flatten(1, -2).sum(1)
    return g.reshape(-1, g.shape[-1])


def examples_in(module: nn.Module, x: Tensor) -> int:
    """Return B: the first dimension, or 1 if there is no batch dimension."""
    single = 3 if isinstance(module, nn.Conv2d) else 1
    return 1 if x.dim() == single else x.shape[0]


def patches(conv: nn.Conv2d, images: Tensor) -> Tensor:
    """Return the input of each output position, ``[B, cin kh kw, positions]``, for any stride, padding and dilation."""
    (kh, kw), (dh, dw) = conv.kernel_size, conv.dilation
    if conv.padding == "same":  # if the total is odd, torch adds the extra one at the end
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
    """Return ``sum r r'`` over rows ``[n, d]``: ``[d, d]``, or ``[d+1, d+1]`` with a one appended to every row."""
    if ones:
        rows = torch.cat([rows, rows.new_ones(rows.shape[0], 1)], 1)
    return rows.mT @ rows


def input_scale(scaling: str, examples: int, rows: int) -> float:
    """Return the factor that turns ``sum a a'`` into A.

    Args:
        scaling: "reference": 1/B; "authors" (shyhuai/kfac_pytorch, lzhangbv/kfac_pytorch): that times 1/T^2; "kaisa"
            (gpauloski/kfac-pytorch): that times 1/T^3.
        examples: B. rows: B T.
    """
    positions = rows / examples
    factor: float = {"reference": 1.0, "authors": positions**-2, "kaisa": positions**-3}[scaling]
    return factor / examples


def gradient_scale(scaling: str, examples: int, rows: int) -> float:
    """Return the factor that turns ``sum g g'``, of the gradients of each example's own loss, into G.

    "reference": 1/(B T); "authors": that times T^2; "kaisa": that times 1/(B^2 T^2), so its damping depends on B.
    """
    positions = rows / examples
    factor: float = {"reference": 1.0, "authors": positions**2, "kaisa": (examples * positions) ** -2.0}[scaling]
    return factor / rows
