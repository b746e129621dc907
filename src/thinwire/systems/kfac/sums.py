"""Raw sums of one layer over the passes of one step, normalised once, at the end of the last pass.

So m micro-batches count as one batch, and a module that is called several times in a pass adds rows. The losses of the
micro-batches must add up to the mean loss of the whole batch (the usual ``loss / m``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.core.kernels.symmetric import pack_upper, packed_size
from thinwire.engine.executors.streams import read_here
from thinwire.systems.kfac.factors import (
    examples_in,
    gradient_rows,
    gradient_scale,
    input_rows,
    input_scale,
    second_moment,
)
from thinwire.systems.kfac.layers import Preconditioned


class LayerSums:
    """Second moments of a layer's inputs and output gradients, and the numbers of rows and examples in them.

    Args:
        layer: the layer.
        scaling, tokens: see :mod:`~thinwire.kfac.factors`.
    """

    def __init__(self, layer: Preconditioned, scaling: str, tokens: str) -> None:
        self._layer, self._scaling, self._tokens = layer, scaling, tokens
        self.clear()

    def clear(self) -> None:
        self.moments: list[Tensor | None] = [None, None]
        self._rows = [0, 0]
        self._examples = self._batch = 0
        self._sampled = False

    def new_pass(self) -> None:
        """Note that another forward begins, with other examples."""
        self._examples += self._batch
        self._batch = 0

    def add_input(self, x: Tensor) -> None:
        """Add an input of the layer. A pass has as many examples as its largest call."""
        module = self._layer.module
        self._batch = max(self._batch, examples_in(module, x))
        self._add(0, input_rows(module, x, self._tokens), ones=self._layer.bias is not None)

    def add_gradient(self, g: Tensor, scale: Tensor | None = None, *, sampled: bool = False) -> None:
        """Add the gradient of a mean loss with respect to the layer's output.

        Args:
            g: in the shape of the layer's output.
            scale: the loss scale contained in it.
            sampled: the loss is the mean over this pass only, however the user scales the training loss.
        """
        rows = gradient_rows(self._layer.module, g, self._tokens)
        if scale is not None:
            rows = rows / scale.to(rows.dtype)
        if sampled:
            rows, self._sampled = rows * self._batch, True
        self._add(1, rows, ones=False)

    def _add(self, side: int, rows: Tensor, *, ones: bool) -> None:
        if not len(rows):
            return
        moment, before = second_moment(rows, ones=ones), self.moments[side]
        self.moments[side] = moment if before is None else before.add_(moment)
        self._rows[side] += rows.shape[0]

    def seen(self, side: int) -> bool:
        """Return whether anything was added to A (0) or G (1)."""
        return self.moments[side] is not None

    def statistic(self, side: int) -> Tensor:
        """Return A (0) or G (1), packed and followed by a one; zeros if nothing was added. Frees the sum."""
        moment, self.moments[side] = self.moments[side], None
        shape, weight = self._layer.shape, self._layer.weight
        if moment is None:
            size = packed_size((shape.d_a, shape.d_g)[side]) + 1
            return torch.zeros(size, dtype=shape.dtype, device=weight.device)
        read_here(moment)  # made in backward, read and freed on the exchange's stream
        examples = self._examples + self._batch
        if side == 0:
            factor = input_scale(self._scaling, examples, self._rows[0])
        else:
            factor = gradient_scale(self._scaling, examples, self._rows[1])
            factor *= 1 if self._sampled else examples**2
        packed = pack_upper(moment).mul_(factor)
        return torch.cat([packed, packed.new_ones(1)]).to(shape.dtype)
