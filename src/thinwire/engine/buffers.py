"""Keep buffers that change in training, above all BatchNorm's statistics, equal to rank 0's, as DDP does.

DDP sends them before a forward. Here they are sent during backward and have arrived when it ends, so no forward waits,
and one rank may evaluate alone. Buffers that do not change in the first step (masks, tables) were made equal by
``attach`` and are not sent.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from thinwire.core.collectives.sockets import memory_of
from thinwire.engine.parameters import Named, buffers_of
from thinwire.engine.ranks.agreement import bytes_of, put_bytes
from thinwire.engine.ranks.communicator import Communicator

logger = logging.getLogger("thinwire")


class Buffers:
    """The buffers of one attached model.

    Args:
        model: the model; the same on all ranks.
        communicator: of the ranks.
    """

    def __init__(self, model: nn.Module, communicator: Communicator) -> None:
        self._model, self._comm = model, communicator
        self._all = [one for one in buffers_of(model) if one.tensor.numel()]
        self._first = [b"" if _norm(one) else self._print(one) for one in self._all]
        self._follow: list[Named] | None = None  # those that are sent; None: not known yet
        self._still: list[tuple[Named, Tensor, int]] = []  # the others, as they were: tensor, version
        self._wait: Callable[[], Tensor] | None = None

    def send(self) -> None:
        """Start sending rank 0's buffers, at the start of a backward."""
        if self._follow:
            self._wait = self._comm.broadcast_later(torch.cat([bytes_of(one.now()) for one in self._follow]))

    @torch.no_grad()
    def receive(self) -> None:
        """Wait for the buffers and take them over, at the end of a backward."""
        if self._follow is None:
            self._learn()
            self.send()
        if self._wait is not None:
            message, self._wait, begin = self._wait(), None, 0
            for one in self._follow or ():
                x = one.now()
                piece = message[begin : begin + x.nbytes]
                begin += x.nbytes
                if not x.is_cuda and torch.equal(piece, bytes_of(x)):  # on CUDA the host would wait for the result
                    continue
                if _norm(one) or x.is_cuda:  # like BatchNorm itself, leave the version: autograd may have saved it
                    put_bytes(x, piece, quietly=True)
                elif self._comm.rank:
                    put_bytes(x, piece)
        self._tell_late()

    def _learn(self) -> None:
        """Find out, after the first step, which buffers change on any rank."""
        mine = bytes(_norm(one) or self._print(one) != first for one, first in zip(self._all, self._first))
        everyone = self._comm.gather(mine) if mine else []
        travels = [any(row[place] for row in everyone) for place in range(len(mine))]
        self._follow = [one for one, goes in zip(self._all, travels) if goes]
        resting = [one for one, goes in zip(self._all, travels) if not goes]
        self._still = [(one, one.now(), one.tensor._version) for one in resting]
        self._first = []
        known = {one.name for one in self._all}
        if late := [one.name for one in buffers_of(self._model) if one.tensor.numel() and one.name not in known]:
            logger.warning(
                "thinwire: the buffer %s was not there at attach, so it is not kept equal across the ranks; call "
                "close() and attach again from here on", late[0],
            )  # fmt: skip

    def _tell_late(self) -> None:
        for one, was, version in self._still:
            if one.now() is not was or was._version != version:
                logger.warning(
                    "thinwire: the buffer %s has changed, although it did not in the first step, so it is not kept "
                    "equal across the ranks; call close() and attach again from here on", one.name,
                )  # fmt: skip
                self._still = []
                return

    def _print(self, one: Named) -> object:
        """Return what changes with a buffer. On CPU a digest: values can change without a version."""
        x = one.now()
        if self._comm.device.type != "cpu":
            return id(x), x._version
        return hashlib.blake2b(memory_of(bytes_of(x)), digest_size=16).digest()


def _norm(one: Named) -> bool:
    return isinstance(one.module, _NormBase)
