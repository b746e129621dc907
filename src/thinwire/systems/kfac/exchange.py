"""The programs of K-FAC: average statistics; send inverses and preconditioned gradients from the ranks that have them.

A *factor* is one side of a layer, ``<layer>/A`` or ``<layer>/G``. Each program is a method on a bucket whose slots are
rows of packed numbers instead of gradients, so the engine, LocalWorld and the simulator run it like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.core.kernels.symmetric import pack_upper
from thinwire.core.program import AllGather, AllReduce, Broadcast, Bucket, Method, Program, Scope, Slot, State
from thinwire.engine.executors.alone import run_alone
from thinwire.engine.session import Channel
from thinwire.systems.kfac.averages import renewed
from thinwire.systems.kfac.plan import KFACPlan

FACTOR, UPDATES = "factor", "updates"
"""Shared fields of a factor: its packed running average, and the number of updates in it."""

Decay = Callable[[Tensor], Tensor]
"""Updates so far, of each -> the weights of the old averages in the next update; of none: 0."""


class _OnRows(Method):
    exact: ClassVar[bool] = True
    cheap_pack: ClassVar[bool] = True


@dataclass(frozen=True)
class FactorExchange(_OnRows):
    """Average new statistics over the ranks that have one, and add them to the running averages.

    A slot is a packed statistic followed by its count: 1, or 0 if this rank did not see the layer. The new statistic is
    exchanged, never the average, so the averages are always equal on all ranks. If a statistic is not finite on some
    rank, the sum is not finite on any rank, and the averages do not change.
    """

    name: ClassVar[str] = "factors"

    decay: Decay
    wire: torch.dtype | None = None  # dtype in which statistics are sent

    def reduce(self, bucket: Bucket, state: State) -> Program:
        yield from self.summed(bucket)
        self.renew(bucket.slots, state)

    def summed(self, bucket: Bucket) -> Program:
        flat = bucket.flat
        bucket.write((yield AllReduce(flat if self.wire is None else flat.to(self.wire))).to(flat.dtype))

    def renew(self, slots: Sequence[Slot], state: State) -> None:
        """Stage the averages with the sums of these slots, those of one dtype in one call.

        The next program on the stream that a sum was made on waits for the current stream, so its memory is not reused
        before.
        """
        rows: dict[torch.dtype, dict[str, Tensor]] = {}
        for slot in slots:
            assert slot.result is not None
            rows.setdefault(slot.dtype, {})[slot.name] = slot.result
        for same in rows.values():
            olds, updates = [], []
            for name, row in same.items():
                old = state.fields.get((FACTOR, name))
                olds.append(torch.zeros_like(row[:-1]) if old is None else old)
                updates.append(row.new_zeros(()) if old is None else state.fields[UPDATES, name])
            before, counts = torch.stack(updates), torch.stack([row[-1] for row in same.values()])
            sums = [row[:-1] for row in same.values()]
            for name, factor, count in zip(same, *renewed(sums, counts, olds, before, self.decay(before))):
                state.stage(name, shared={FACTOR: factor, UPDATES: count})


@dataclass(frozen=True)
class FromOwner(_OnRows):
    """Send one rank's rows to its whole group: inverses to the preconditioning ranks, or preconditioned gradients."""

    name: ClassVar[str] = "from_owner"

    owner: int  # its position in the group; the others' slots have no value
    group: Scope

    def reduce(self, bucket: Bucket, state: State) -> Program:
        bucket.write((yield Broadcast(bucket.flat, self.group, self.owner)))


@dataclass(frozen=True)
class FromAll(_OnRows):
    """Send every rank's rows to its whole group in one all-gather, padded to the longest message."""

    name: ClassVar[str] = "from_all"

    owners: tuple[int, ...]  # of each slot: its owner's position in the group
    group: Scope = Scope.WORLD

    def reduce(self, bucket: Bucket, state: State) -> Program:
        members = state.topology.members(self.group, state.rank)
        place, lengths = members.index(state.rank), [0] * len(members)
        for slot, owner in zip(bucket.slots, self.owners, strict=True):
            lengths[owner] += slot.numel
        own = [
            s.value_or_zeros().reshape(-1) for s, owner in zip(bucket.slots, self.owners, strict=True) if owner == place
        ]
        padding = torch.zeros(max(lengths) - lengths[place], dtype=bucket.dtype, device=bucket.device)
        everyone = yield AllGather(torch.cat([*own, padding]), self.group)
        offsets = [0] * len(members)
        for slot, owner in zip(bucket.slots, self.owners, strict=True):
            slot.write(everyone[owner, offsets[owner] : offsets[owner] + slot.numel])
            offsets[owner] += slot.numel


def exchanged(
    channel: Channel,
    state: State,
    messages: Sequence[tuple[FromOwner | FromAll, Sequence[int]]],
    slot: Callable[[int], Slot],
    prepare: Callable[[int], None],
) -> tuple[dict[int, Tensor], float]:
    """Send messages of items in order, each after ``prepare(index)``, which makes this rank's rows of it.

    ``slot`` describes an item, with its row if this rank has made it. Returns all rows, and the seconds of waiting.
    """
    buckets: dict[int, Bucket] = {}

    def make(index: int) -> Program:
        program, items = messages[index]
        buckets[index] = Bucket(index, [slot(item) for item in items])
        return program.reduce(buckets[index], state)

    channel.begin([[slot(item).name for item in items] for _, items in messages], make)
    for index in range(len(messages)):
        prepare(index)
        channel.ready(index)
    waited = channel.wait()
    found = {}
    for index, (_, items) in enumerate(messages):
        for item, sent in zip(items, buckets[index].slots):
            assert sent.result is not None
            found[item] = sent.result
    return found, waited


def decay_of(decay: Any) -> Decay:
    """``"warmup"``: ``min(1 - 1/n, 0.95)`` at update n (Martens and Grosse 2015, section 5)."""
    if decay == "warmup":
        return lambda updates: (1 - 1 / (updates + 1)).clamp(max=0.95)
    return lambda updates: updates.clamp(max=1) * float(decay)


def gather(x: Tensor) -> Program:
    return (yield AllGather(x))


class FactorRounds:
    """One exchange of statistics after another: which messages there are, when each may be sent, what they update."""

    def __init__(
        self, plan: KFACPlan, channel: Channel, state: State, program: FactorExchange,
        statistic: Callable[[int, int], Tensor], device: torch.device,
    ) -> None:  # fmt: skip
        self._channel, self._state, self._program = channel, state, program
        self._statistic, self._device = statistic, device
        self.updates = 0
        self._closed = False
        self._slots: list[Slot] = []  # of the round's messages
        self.adopt(plan)

    def adopt(self, plan: KFACPlan) -> None:
        self.plan = plan
        self._messages = [(side, b) for side, bs in ((0, plan.a_buckets), (1, plan.g_buckets)) for b in bs]
        self._where = {(side, layer): i for i, (side, layers) in enumerate(self._messages) for layer in layers}
        self._left: list[int] = []

    def begin(self) -> None:
        self.drain()  # a round that no step has used
        self._left = [len(layers) for _, layers in self._messages]
        names = [[self.plan.factor(2 * i + side) for i in layers] for side, layers in self._messages]
        self._channel.begin(names, self._make)

    def complete(self, layer: int, side: int) -> None:
        """Note that a statistic is complete; if the plan overlaps and it was a message's last one, send the message."""
        if not (self.plan.overlap and self.plan.exchange):
            return
        index = self._where[side, layer]
        self._left[index] -= 1
        if self._left[index] == 0:
            self._send(index)

    def end(self) -> None:
        """Note that the passes are over; if the plan overlaps, send all remaining messages."""
        self._closed = True
        if self.plan.overlap:
            self._send_rest()

    def _send_rest(self) -> None:
        for index, left in enumerate(self._left):
            if left >= 0:
                self._send(index)

    def _send(self, index: int) -> None:
        self._left[index] = -1
        self._channel.ready(index)

    def _make(self, index: int) -> Program:
        side, layers = self._messages[index]
        return self._update(index, [(i, side) for i in layers])

    def _update(self, index: int, factors: list[tuple[int, int]]) -> Program:
        slots = []
        for layer, side in factors:
            shape, row = self.plan.layers[layer], self._statistic(layer, side)
            slots.append(Slot(self.plan.factor(2 * layer + side), row.shape, row, shape.dtype, self._device))
        self._slots.extend(slots)
        return self._program.summed(Bucket(index, slots))

    def drain(self) -> float:
        """Wait for the round that has ended and update the factors, once. Return the seconds of waiting."""
        if not self._closed:
            return 0.0
        self._closed = False
        self._send_rest()  # if the plan does not overlap: in the same order on all ranks, as NCCL requires
        waited = self._channel.wait()
        if not self.plan.exchange:  # use the owner's own batch
            for layer in range(len(self.plan.layers)):
                if self.plan.mine(layer, self._state.rank):
                    run_alone(self._update(layer, [(layer, 0), (layer, 1)]))
        self._program.renew(self._slots, self._state)
        self._slots.clear()
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
                self._state.stage(self.plan.factor(item), shared={FACTOR: pack_upper(eye), UPDATES: eye.new_ones(())})
        self._state.end_step()
