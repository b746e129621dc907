"""One exchange of statistics: which messages there are, when each may be sent, and how results update the averages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.core.kernels.symmetric import pack_upper
from thinwire.core.program import Bucket, Program, Slot, State
from thinwire.engine.executors.alone import run_alone
from thinwire.engine.session import Channel
from thinwire.systems.kfac.plan import KFACPlan
from thinwire.systems.kfac.programs import FACTOR, UPDATES, FactorExchange

Statistic = Callable[[int, int], Tensor]
"""(layer, 0 for A or 1 for G) -> its packed statistic followed by a count; called once per round."""


@dataclass(frozen=True)
class _Message:
    side: int
    layers: tuple[int, ...]


class FactorRounds:
    """The exchanges of one rank.

    Args:
        plan: says which factors share a message.
        channel: sends the messages.
        state: holds the factors.
        program: averages the statistics and updates the factors.
        statistic: see ``Statistic``.
        device: of the factors.
    """

    def __init__(
        self,
        plan: KFACPlan,
        channel: Channel,
        state: State,
        program: FactorExchange,
        statistic: Statistic,
        device: torch.device,
    ) -> None:
        self._channel, self._state, self._program = channel, state, program
        self._statistic, self._device = statistic, device
        self.updates = 0
        self._closed = False
        self.adopt(plan)

    def adopt(self, plan: KFACPlan) -> None:
        """Switch to another plan, between two rounds."""
        self.plan = plan
        self._messages = [_Message(side, b) for side, bs in ((0, plan.a_buckets), (1, plan.g_buckets)) for b in bs]
        self._where = {(m.side, layer): i for i, m in enumerate(self._messages) for layer in m.layers}
        self._left: list[int] = []

    def begin(self) -> None:
        """Begin a captured pass. First finish a round that no step has used."""
        self.drain()
        self._left = [len(message.layers) for message in self._messages]
        names = [[self.plan.factor(2 * i + m.side) for i in m.layers] for m in self._messages]
        self._channel.begin(names, self._make)

    def complete(self, layer: int, side: int) -> None:
        """Note that a statistic is complete; if the plan overlaps and it was a message's last one, send the message."""
        if not (self.plan.overlap and self.plan.exchange):
            return
        index = self._where[side, layer]
        self._left[index] -= 1
        if self._left[index] == 0:
            self._leave(index)

    def end(self) -> None:
        """Note that the passes are over; if the plan overlaps, send all remaining messages."""
        self._closed = True
        if self.plan.overlap:
            self._leave_all()

    def _leave_all(self) -> None:
        for index, left in enumerate(self._left):
            if left >= 0:
                self._leave(index)

    def _leave(self, index: int) -> None:
        self._left[index] = -1
        self._channel.ready(index)

    def _make(self, index: int) -> Program:
        message = self._messages[index]
        return self._program.reduce(self._bucket(index, [(i, message.side) for i in message.layers]), self._state)

    def _bucket(self, index: int, factors: list[tuple[int, int]]) -> Bucket:
        slots = []
        for layer, side in factors:
            shape, row = self.plan.layers[layer], self._statistic(layer, side)
            slots.append(Slot(self.plan.factor(2 * layer + side), row.shape, row, shape.dtype, self._device))
        return Bucket(index, slots)

    def drain(self) -> float:
        """Wait for the round that has ended and update the factors, once. Return the seconds of waiting.

        If the plan does not overlap, its messages are sent here, in the same order on all ranks, as NCCL requires.
        """
        if not self._closed:
            return 0.0
        self._closed = False
        self._leave_all()
        waited = self._channel.wait()
        if not self.plan.exchange:  # use the owner's own batch
            for layer in range(len(self.plan.layers)):
                if self.plan.mine(layer, self._state.rank):
                    run_alone(self._program.reduce(self._bucket(layer, [(layer, 0), (layer, 1)]), self._state))
        self._state.end_step()
        self.updates += 1
        return waited

    def blank(self) -> bool:
        """Return whether no G has been taken in yet: the first step may have overflowed. Reads from the device."""
        counts = [value for (field, name), value in self._state.fields.items() if field == UPDATES and name[-1] == "G"]
        return not counts or not bool(torch.stack([c.to(torch.float64) for c in counts]).max() > 0)

    def identity(self) -> None:
        """Begin with identity matrices, as the authors' code does."""
        for item in range(2 * len(self.plan.layers)):
            if self.plan.exchange or self.plan.mine(item // 2, self._state.rank):
                eye = torch.eye(self.plan.dim(item), dtype=self.plan.layers[item // 2].dtype, device=self._device)
                one = torch.ones((), dtype=eye.dtype, device=self._device)
                self._state.stage(self.plan.factor(item), shared={FACTOR: pack_upper(eye), UPDATES: one})
        self._state.end_step()
