"""From a layer's inputs and output gradients to its two Kronecker factors: rows, second moments, scalings.

Source: Martens and Grosse 2015 (arXiv 1503.05671) for linear layers, Grosse and Martens 2016 (arXiv 1602.01407) for
convolutions. With B examples, T positions of each, and b = 1 if there is a bias (else 0), a row of *a* is an input
position followed by a one if b = 1, ``[B T, d_A]``, and a row of *g* is the gradient of one example's loss at an output
position, ``[B T, d_G]``; then ``A = sum a a' / B`` and ``G = sum g g' / (B T)``. This is the *reference* scaling.
"authors" (shyhuai/kfac_pytorch, lzhangbv/kfac_pytorch) has 1/T^2 times this A and T^2 times this G, "kaisa"
(gpauloski/kfac-pytorch) 1/T^3 times A and 1/(B^2 T^2) times G, so its damping depends on B.

The sums of a layer run over the passes of one step and are normalised once, at the end of the last pass: so m
micro-batches count as one batch, and a module that is called several times in a pass adds rows. The losses of the
micro-batches must add up to the mean loss of the whole batch (the usual ``loss / m``).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.core.kernels.symmetric import packed_size, packed_times
from thinwire.core.program import working_dtype
from thinwire.engine.executors.streams import read_here
from thinwire.systems.kfac.layers import Preconditioned


def input_rows(module: nn.Module, x: Tensor, tokens: str = "expand") -> Tensor:
    """Return the rows of *a* without the ones, ``[rows, d_A - b]``, in the working dtype; "reduce": examples' means."""
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


class LayerSums:
    """Second moments of a layer's inputs and output gradients, and the numbers of rows and examples in them."""

    def __init__(self, layer: Preconditioned, scaling: str, tokens: str) -> None:
        self._layer, self._scaling, self._tokens = layer, scaling, tokens
        self.clear()

    def clear(self) -> None:
        self.moments: list[Tensor | None] = [None, None]
        self._rows = [0, 0]
        self._examples = self._batch = 0
        self._sampled = False

    def new_pass(self) -> None:
        self._examples += self._batch
        self._batch = 0

    def add_input(self, x: Tensor) -> None:
        """Add an input of the layer. A pass has as many examples as its largest call."""
        module = self._layer.module
        single = x.dim() == (3 if isinstance(module, nn.Conv2d) else 1)  # no batch dimension
        self._batch = max(self._batch, 1 if single else x.shape[0])
        self._add(0, input_rows(module, x, self._tokens), ones=self._layer.bias is not None)

    def add_gradient(self, g: Tensor, scale: Tensor | None = None, *, sampled: bool = False) -> None:
        """Add the gradient of a mean loss by the layer's output; ``sampled``: of a mean over this pass alone."""
        rows = gradient_rows(self._layer.module, g, self._tokens)
        if scale is not None:
            rows = rows / scale.to(rows.dtype)
        if sampled:
            rows, self._sampled = rows * self._batch, True
        self._add(1, rows, ones=False)

    def _add(self, side: int, rows: Tensor, *, ones: bool) -> None:
        if not len(rows):
            return
        if ones:
            rows = torch.cat([rows, rows.new_ones(rows.shape[0], 1)], 1)
        moment, before = rows.mT @ rows, self.moments[side]
        self.moments[side] = moment if before is None else before.add_(moment)
        self._rows[side] += rows.shape[0]

    def statistic(self, side: int) -> Tensor:
        """Return A (0) or G (1), packed and followed by a one; zeros if nothing was added. Frees the sum."""
        moment, self.moments[side] = self.moments[side], None
        shape, weight = self._layer.shape, self._layer.weight
        if moment is None:
            size = packed_size((shape.d_a, shape.d_g)[side]) + 1
            return torch.zeros(size, dtype=shape.dtype, device=weight.device)
        read_here(moment)  # made in backward, read and freed on the exchange's stream
        b, rows = self._examples + self._batch, self._rows[side]
        t = rows / b
        of_a, of_g = {
            "reference": (1.0, 1.0), "authors": (t**-2, t**2), "kaisa": (t**-3, (b * t) ** -2.0),
        }[self._scaling]  # fmt: skip
        factor: float = of_g / rows * (1 if self._sampled else b**2) if side else of_a / b
        return packed_times(moment, factor, 1.0).to(shape.dtype)
