"""Buffers that change in training, above all BatchNorm's statistics: every rank has rank 0's, as under DDP.

DDP sends them before a forward. Here they travel while backward runs, and are there when it ends: no forward waits, and
one rank may evaluate alone. What never changes (masks, tables) was equal at ``attach`` and does not travel.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from thinwire.collectives.stream import memory_of
from thinwire.engine.communicator import Communicator

logger = logging.getLogger("thinwire")


class Buffers:
    """Of one attached model.

    Args:
        model: whose; on all ranks alike.
        communicator: of the ranks.
    """

    def __init__(self, model: nn.Module, communicator: Communicator) -> None:
        self._comm = communicator
        self._owners = [(name, module) for name, module in model.named_modules() if module._buffers]
        self._follow: list[int] | None = None  # places of the modules whose buffers travel; None: not known yet
        self._first = [self._print(module) for _, module in self._owners]
        self._still: list[tuple[str, Tensor, int]] = []  # what does not travel: name, tensor, version
        self._message: Tensor | None = None
        self._wait: Callable[[], Tensor] | None = None

    def send(self) -> None:
        """A backward begins: let rank 0's buffers travel."""
        if not self._follow:
            return
        parts = [x.detach().contiguous().reshape(-1).view(torch.uint8) for _, x in self._travelling()]
        message = torch.cat(parts)
        if self._message is not None and self._message.numel() != message.numel():
            raise RuntimeError(
                "a buffer of the model has another size than in earlier steps, so rank 0's cannot be taken over: "
                "attach with broadcast_buffers=False"
            )
        self._message = message
        self._wait = self._comm.broadcast_later(message)

    @torch.no_grad()
    def receive(self) -> None:
        """The backward ends: take them over."""
        if self._follow is None:
            self._learn()
            self.send()
        if self._wait is not None:
            message, self._wait, begin = self._wait(), None, 0
            for _, x in self._travelling():
                if self._comm.rank:
                    x.copy_(message[begin : begin + x.nbytes].view(x.dtype).view(x.shape))
                begin += x.nbytes
        self._tell_late()

    def _learn(self) -> None:
        """After the first step: which modules' buffers change, on any rank."""
        mine = bytes(
            isinstance(module, _NormBase) or self._print(module) != first
            for (_, module), first in zip(self._owners, self._first)
        )
        everyone = self._comm.gather(mine) if mine else []
        self._follow = [place for place in range(len(mine)) if any(row[place] for row in everyone)]
        resting = [owner for place, owner in enumerate(self._owners) if place not in self._follow]
        self._still = [(f"{name}.{key}", x, x._version) for name, m in resting for key, x in _present(m)]
        self._first = []

    def _tell_late(self) -> None:
        for name, x, version in self._still:
            if x._version != version:
                logger.warning(
                    "thinwire: the buffer %s has changed, which it had not in the first step, so it is not kept equal "
                    "over the ranks; detach() and attach again from here on", name.lstrip("."),
                )  # fmt: skip
                self._still = []
                return

    def _travelling(self) -> Iterator[tuple[str, Tensor]]:
        for place in self._follow or ():
            yield from _present(self._owners[place][1])

    def _print(self, module: nn.Module) -> bytes | list[tuple[int, int]]:
        """What tells whether a module's buffers are still the same. Statistics change without a new version."""
        held = [x for _, x in _present(module)]
        if self._comm.device.type != "cpu":
            return [(id(x), x._version) for x in held]
        found = hashlib.blake2b(digest_size=16)
        for x in held:
            found.update(memory_of(x.detach().contiguous()))
        return found.digest()


def _present(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((key, x) for key, x in module._buffers.items() if x is not None and x.numel())
