"""Keep buffers that change in training, above all BatchNorm's statistics, equal to rank 0's, as DDP does.

DDP sends them before a forward. Here they are sent during backward and have arrived when it ends, so no forward waits,
and one rank may evaluate alone. Buffers that never change (masks, tables) were made equal by ``attach`` and are not
sent.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from thinwire.engine.ranks.communicator import Communicator
from thinwire.link.memory import memory_of

logger = logging.getLogger("thinwire")


class Buffers:
    """The buffers of one attached model.

    Args:
        model: the model; the same on all ranks.
        communicator: of the ranks.
    """

    def __init__(self, model: nn.Module, communicator: Communicator) -> None:
        self._comm = communicator
        self._owners = [_Owner(name, module) for name, module in model.named_modules() if module._buffers]
        self._follow: list[_Owner] | None = None  # modules whose buffers are sent; None: not known yet
        self._first = [self._print(owner) for owner in self._owners]
        self._still: list[tuple[str, Tensor, int]] = []  # buffers that are not sent: name, tensor, version
        self._wait: Callable[[], Tensor] | None = None

    def send(self) -> None:
        """Start sending rank 0's buffers, at the start of a backward."""
        if self._follow:
            self._wait = self._comm.broadcast_later(
                torch.cat([_bytes(x) for o in self._follow for x in o.held.values()])
            )

    @torch.no_grad()
    def receive(self) -> None:
        """Wait for the buffers and take them over, at the end of a backward."""
        if self._follow is None:
            self._learn()
            self.send()
        if self._wait is not None:
            message, self._wait, begin = self._wait(), None, 0
            for owner in self._follow or ():
                for x in owner.held.values():
                    piece = message[begin : begin + x.nbytes]
                    begin += x.nbytes
                    if not x.is_cuda and torch.equal(piece, _bytes(x)):  # on CUDA the host would wait for the result
                        continue
                    value = piece.view(x.dtype).view(x.shape)
                    if owner.norm or x.is_cuda:
                        # Like BatchNorm itself, leave the version as it is: autograd may have saved it.
                        x.data.copy_(value)
                    elif self._comm.rank:
                        x.copy_(value)
        self._tell_late()

    def _learn(self) -> None:
        """Find out, after the first step, which modules' buffers change on any rank. Replaced buffers stay local."""
        mine = bytes(
            2 if owner.replaced else int(owner.norm or self._print(owner) != first)
            for owner, first in zip(self._owners, self._first)
        )
        everyone = self._comm.gather(mine) if mine else []
        follow = [max(row[place] for row in everyone) == 1 for place in range(len(mine))]
        self._follow = [owner for owner, travels in zip(self._owners, follow) if travels]
        resting = [owner for owner, travels in zip(self._owners, follow) if not travels]
        self._still = [(f"{o.name}.{key}", x, x._version) for o in resting for key, x in o.held.items()]
        self._first = []

    def _tell_late(self) -> None:
        for name, x, version in self._still:
            if x._version != version:
                logger.warning(
                    "thinwire: the buffer %s has changed, although it did not in the first step, so it is not kept "
                    "equal across the ranks; call close() and attach again from here on", name.lstrip("."),
                )  # fmt: skip
                self._still = []
                return

    def _print(self, owner: _Owner) -> bytes | list[int]:
        """Return a digest that changes with a module's buffers. On CPU, bytes: statistics change without a version."""
        if self._comm.device.type != "cpu":
            return [x._version for x in owner.held.values()]
        found = hashlib.blake2b(digest_size=16)
        for x in owner.held.values():
            found.update(memory_of(x.detach().contiguous()))
        return found.digest()


class _Owner:
    """A module and the buffers that it had at ``attach``; a buffer that replaces one of them is not exchanged."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self._module = name, module
        self.norm = isinstance(module, _NormBase)
        self.held = {key: x for key, x in module._buffers.items() if x is not None and x.numel()}

    @property
    def replaced(self) -> bool:
        return any(self._module._buffers.get(key) is not x for key, x in self.held.items())


def _bytes(x: Tensor) -> Tensor:
    return x.detach().contiguous().reshape(-1).view(torch.uint8)
