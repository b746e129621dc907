"""A node whose ranks compute each gradient together: the mean over its ranks, by all-reduce, is one submission.

The weights reach the node once and are then broadcast; each gradient leaves it once. On GPUs both stay on the machine's
own links. With local steps, each inner step is a synchronous step of the whole node.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from thinwire.core.program import AllReduce, Broadcast, Program
from thinwire.predict.measure.profile_model import Batches, Loss, numbered
from thinwire.systems.parameter_server.layout import Layout
from thinwire.systems.parameter_server.local_work import local_gradient

if TYPE_CHECKING:
    from thinwire.engine.services import Services

_END = -1


class NodeMean:
    """One rank of a node. The node's leader knows only rank 0 as a worker; the other ranks do what rank 0 announces.

    Args:
        model: of this rank.
        batches: of this rank, see :func:`run`.
        loss: (model, batch) -> mean loss.
        ranks: of the node: a GradientSync's services; its own exchange during backward must be off (``no_sync``).

    Differences from InHAD's local aggregator, of which only the abstract is public: the ranks of a node work in step,
    and the mean is taken over the whole gradient after backward.
    """

    def __init__(self, model: nn.Module, batches: Batches, loss: Loss, ranks: Services) -> None:
        self._model, self._ranks, self._layout = model, ranks, Layout.of(model)
        self._gradient = partial(local_gradient, model, self._layout, numbered(batches), loss)
        self._size = ranks.topology.world_size
        self._device = next(model.parameters()).device

    def gradient(self, theta: Tensor, batch: int) -> tuple[Tensor, float, int]:
        """On rank 0: return the mean gradient ``[D]`` at ``theta`` ``[D]``, the mean loss, and the sum of samples."""
        self._ranks.run(self.announce(theta, batch, 0))
        return self._together(theta, batch)

    def end(self, version: int) -> None:
        """On rank 0: announce the end; all ranks take its weights and buffers."""
        self._ranks.run(self.announce(self._layout.flat(self._model), _END, version))
        self._ranks.run(self.share_buffers())

    def follow(self) -> tuple[int, int]:
        """On another rank: compute what rank 0 announces, until the end.

        Return the number of gradients and the version.
        """
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
        """Broadcast the weights and the number of the next batch from rank 0. Returns (weights, batch, version)."""
        header = yield Broadcast(torch.tensor([batch, version], device=self._device))
        room = torch.empty(self._layout.numel, dtype=self._layout.dtype) if theta is None else theta.clone()
        weights = yield Broadcast(room.to(self._device))
        batch, version = header.tolist()
        return weights, batch, version

    def mean(self, flat: Tensor, loss: float, samples: int) -> Program:
        """All-reduce: the mean gradient, the mean loss and the sum of samples."""
        total = yield AllReduce(torch.cat([flat, flat.new_tensor([loss, samples])]))
        gradient, (loss_sum, all_samples) = total[:-2] / self._size, total[-2:].tolist()
        return gradient, loss_sum / self._size, round(all_samples)

    def share_buffers(self) -> Program:
        """Broadcast rank 0's buffers."""
        layout = self._layout.buffers
        if layout.numel:
            flat = yield Broadcast(layout.flat(self._model))
            layout.write(flat, self._model)

    def _together(self, theta: Tensor, batch: int) -> tuple[Tensor, float, int]:
        mine = self._gradient(theta, batch)
        gradient, loss, samples = self._ranks.run(self.mean(*mine))
        return gradient, loss, samples
