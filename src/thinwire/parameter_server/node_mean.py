"""A node whose ranks compute each gradient together: its mean over them, by all-reduce, is one submission.

Weights travel to the node once and on by broadcast, gradients leave it once. On GPUs both stay inside the machine's own
links; with local steps each inner step is a synchronous one of the whole node.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from thinwire.measure.batches import Batches, Loss, numbered
from thinwire.parameter_server.layout import Layout
from thinwire.parameter_server.local_work import local_gradient
from thinwire.program import AllReduce, Broadcast, Program

if TYPE_CHECKING:
    from thinwire.engine.services import Services

_END = -1


class NodeMean:
    """One rank of a node. Rank 0 is the only worker that the node's leader knows; the others do what it announces.

    Args:
        model: of this rank.
        batches: of this rank, see :func:`run`.
        loss: (model, batch) -> mean loss.
        ranks: of the node: a GradientSync's services; its own exchange during backward must be off (``no_sync``).

    Differences from InHAD's local aggregator, of which only the abstract is public: the ranks of a node are in step,
    and the mean is taken of the whole gradient after backward.
    """

    def __init__(self, model: nn.Module, batches: Batches, loss: Loss, ranks: Services) -> None:
        self._model, self._ranks, self._layout = model, ranks, Layout.of(model)
        self._gradient = partial(local_gradient, model, self._layout, numbered(batches), loss)
        self._size = ranks.topology.world_size
        self._device = next(model.parameters()).device

    def gradient(self, theta: Tensor, batch: int) -> tuple[Tensor, float, int]:
        """Rank 0: the mean gradient ``[D]`` at ``theta`` ``[D]`` over all ranks, their mean loss, and all samples."""
        self._ranks.run(self.announce(theta, batch, 0))
        return self._together(theta, batch)

    def end(self, version: int) -> None:
        """Rank 0: nothing more will come; all take its weights and buffers."""
        self._ranks.run(self.announce(self._layout.flat(self._model), _END, version))
        self._ranks.run(self.share_buffers())

    def follow(self) -> tuple[int, int]:
        """Another rank: compute what rank 0 announces, to the end. Returns the number of gradients and the version."""
        count = 0
        while True:
            theta, batch, version = self._ranks.run(self.announce(None, 0, 0))
            if batch == _END:
                self._layout.write(theta, self._model)
                self._ranks.run(self.share_buffers())
                return count, version
            self._together(theta, batch)
            count += 1

    def announce(self, theta: Tensor | None, batch: int, version: int) -> Program:
        """Weights and number of the next batch, from rank 0 to all. Returns (weights, batch, version)."""
        header = yield Broadcast(torch.tensor([batch, version], device=self._device))
        room = torch.empty(self._layout.numel, dtype=self._layout.dtype) if theta is None else theta.clone()
        weights = yield Broadcast(room.to(self._device))
        batch, version = header.tolist()
        return weights, batch, version

    def mean(self, flat: Tensor, loss: float, samples: int) -> Program:
        """Over all ranks: gradient, loss, and the sum of samples."""
        total = yield AllReduce(torch.cat([flat, flat.new_tensor([loss, samples])]))
        gradient, (loss_sum, all_samples) = total[:-2] / self._size, total[-2:].tolist()
        return gradient, loss_sum / self._size, round(all_samples)

    def share_buffers(self) -> Program:
        """Rank 0's buffers to all."""
        layout = self._layout.buffers
        if layout.numel:
            flat = yield Broadcast(layout.flat(self._model))
            layout.write(flat, self._model)

    def _together(self, theta: Tensor, batch: int) -> tuple[Tensor, float, int]:
        mine = self._gradient(theta, batch)
        gradient, loss, samples = self._ranks.run(self.mean(*mine))
        return gradient, loss, samples
