"""The engine of rounds: which fragments are under way, and what travels with them.

Besides parameters, a round carries buffers, and moments of the inner optimizer. Moments and running statistics
(BatchNorm's) become the mean over the ranks where they are finite. Other buffers become rank 0's, as under DDP: the
mean of two keys, or of two unit vectors, is none. To integers, what this rank counted during the exchange is added.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from thinwire.core.collectives.exchange import ByteCounter
from thinwire.core.collectives.socket_stream import shares_memory
from thinwire.core.methods.base import all_finite
from thinwire.core.program import AllReduce, Broadcast, Program, Scope, Topology, working_dtype
from thinwire.core.program.bucket import local_shard
from thinwire.core.program.local_world import run_lockstep
from thinwire.core.program.trace import depths
from thinwire.engine.local.rounds import Fragment, Rounds
from thinwire.engine.local.settings import Local
from thinwire.engine.parameters import Named
from thinwire.engine.ranks.agreement import deepest_of_all
from thinwire.engine.services import Services
from thinwire.engine.session import Channel

logger = logging.getLogger("thinwire")
_LOOKS = 8  # rounds from one look for frozen parameters that a script has changed to the next
_IN_VAIN = 3  # consecutive dropped rounds of a fragment after which to warn: more than an accident of one step


class RoundChannel(Protocol):
    ledger: ByteCounter

    def begin(self, names: Sequence[Sequence[str]], make: Callable[[int], Program]) -> None: ...

    def ready(self, index: int, *, inline: bool = True) -> None: ...

    def wait(self) -> float: ...


Kind = tuple[torch.dtype, bool]
"""Tensors that travel together: their dtype, and whether they become the mean."""


def _kind(dtype: torch.dtype, mean: bool) -> Kind:
    return dtype, mean and dtype.is_floating_point


class Averages:
    """One rank's tensors beside weights, each with whether it becomes the mean over the ranks, or else rank 0's."""

    def __init__(self) -> None:
        self._received = dict[Kind, Tensor]()
        self._sent = dict[Kind, Tensor]()  # of what becomes rank 0's
        self._by_kind: dict[Kind, list[Tensor]] = {}

    def send(self, tensors: Iterable[tuple[Tensor, bool]]) -> Program:
        """Return a round's program. The tensors, in equal order on all ranks, may change while it runs."""
        self._aim(tensors)
        sent = {kind: _flat(some) for kind, some in self._by_kind.items()}
        self._sent = {kind: sent[kind].clone() for kind in self._of_rank_0()}
        return self._exchange(sent)

    def _aim(self, tensors: Iterable[tuple[Tensor, bool]]) -> None:
        self._by_kind.clear()
        for x, mean in tensors:
            if x.numel():
                self._by_kind.setdefault(_kind(x.dtype, mean), []).append(x)

    def _of_rank_0(self) -> list[Kind]:
        return [kind for kind in self._by_kind if not kind[1]]

    def _exchange(self, sent: dict[Kind, Tensor]) -> Program:
        for kind, x in sent.items():
            dtype, mean = kind
            if mean:
                sizes = [one.numel() for one in self._by_kind[kind]]
                own = x.to(working_dtype(dtype)).split(sizes)
                finite = [all_finite(one) for one in own]
                given = [torch.where(ok, one, torch.zeros_like(one)) for ok, one in zip(finite, own)]
                total = yield AllReduce(torch.cat([*given, torch.stack(finite).to(own[0].dtype)]))
                *sums, ranks = total.split([*sizes, len(sizes)])
                self._received[kind] = torch.cat([one / count for one, count in zip(sums, ranks)])
            else:
                self._received[kind] = (yield Broadcast(x.view(torch.uint8))).view(dtype)  # Gloo lacks some dtypes

    @torch.no_grad()
    def merge(self, tensors: Iterable[tuple[Tensor, bool]] | None = None) -> None:
        """Take over what has arrived, into ``tensors`` or what was sent.

        A mean that was finite on no rank (a mask's) is left out, and so is what is rank 0's where it was sent alike.
        """
        if self._received and tensors is not None:
            self._aim(tensors)
        for kind, received in self._received.items():
            some = self._by_kind[kind]
            sizes = [x.numel() for x in some]
            sent = self._sent[kind].split(sizes) if kind in self._sent else [None] * len(some)
            for x, part, was in zip(some, received.split(sizes), sent):
                new = part.view(x.shape)
                if was is None:
                    new = torch.where(all_finite(part), new, x.to(new.dtype)).to(x.dtype)
                elif torch.equal(part.view(torch.uint8), was.view(torch.uint8)):  # float8 knows no comparison
                    continue
                elif x.dtype.is_signed and not (x.is_floating_point() or x.is_complex()):
                    new = new + x - was.view(x.shape)
                if shares_memory(x):
                    x.data = new.clone()
                else:
                    x.copy_(new)
        self._received.clear()
        self._sent.clear()

    def snapshot(self) -> list[Tensor]:
        return [x.clone() for x in (*self._received.values(), *self._sent.values())]

    def restore(self, saved: Iterable[Tensor], tensors: Iterable[tuple[Tensor, bool]]) -> None:
        self._aim(tensors)
        values = iter(saved)
        received, sent = (
            {kind: x.to(self._by_kind[kind][0].device, copy=True) for kind, x in zip(kinds, values)}
            for kinds in (list(self._by_kind), self._of_rank_0())
        )
        self._received, self._sent = received, sent


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in tensors])


class Moments:
    def __init__(
        self, every: dict[str, int], optimizers: Iterable[torch.optim.Optimizer], parameters: Iterable[Tensor]
    ) -> None:
        self._every, self._optimizers, self._parameters = every, list(optimizers), list(parameters)

    @property
    def dtypes(self) -> set[torch.dtype]:
        return {p.dtype for p in self._parameters} if self._every else set()

    def due(self, round_: int) -> list[Tensor]:
        """Return what is averaged in the round of this number, from 1; zeros, to be ignored, for missing state."""
        states = [[o.state[p] for o in self._optimizers if p in o.state] for p in self._parameters]
        tensors = [{key: x for one in some for key, x in one.items() if isinstance(x, Tensor)} for some in states]
        for name in self._every:
            if not any(name in state for state in tensors):
                known = ", ".join(sorted({key for state in tensors for key in state})) or "none"
                raise ValueError(f"moments: the optimizer has no state {name!r}; it has {known}")
        names = [name for name, every in self._every.items() if round_ % every == 0]
        pairs = list(zip(self._parameters, tensors))
        found = (state[name] if name in state else torch.zeros_like(p) for name in names for p, state in pairs)
        return [local_shard(x) for x in found]


class BuffersAndFrozen:
    """What travels with the last fragment: buffers, and frozen parameters that a script changes, as targets do.

    Running statistics, buffers ``averaged`` by name, and frozen parameters become the mean.
    """

    def __init__(
        self,
        buffers: Sequence[Named],
        frozen: Sequence[Named],
        gather: Callable[[bytes], list[bytes]],
        averaged: Sequence[str] = (),
    ) -> None:
        self._frozen, self._gather = frozen, gather
        if unknown := {*averaged} - {one.name for one in buffers if one.tensor.is_floating_point()}:
            raise ValueError(f"average_buffers: rounds carry no floating-point buffer {min(unknown)!r}")
        self._buffers = [(one, one.statistic or one.name in averaged) for one in buffers]
        self._seen: list[Tensor | None] = [_sample(one.tensor) for one in frozen]  # None: counts as changed
        self.names: set[str] = set()  # of the frozen ones that some rank's script has changed between two looks
        self._told = False
        own = [one for one, mean in self._buffers if not mean and one.tensor.is_floating_point()]
        self._own = [(one, _sample(one.tensor)) for one in own]  # until it is known which of them change
        self._left: list[tuple[Named | Tensor, bool]] = []

    def kinds(self, moments: Iterable[torch.dtype]) -> set[Kind]:
        means = {_kind(dtype, True) for dtype in (*moments, *(one.tensor.dtype for one in self._frozen))}
        return means | {_kind(one.tensor.dtype, mean) for one, mean in self._buffers}

    def look(self, round_: int = 0) -> None:
        """Find out, before some rounds, which frozen parameters a script has changed since the last look."""
        if not self._frozen or round_ % _LOOKS:
            return
        now = [_sample(one.now()) for one in self._frozen]
        rows = self._gather(bytes(was is None or not torch.equal(x, was) for x, was in zip(now, self._seen)))
        self._seen = [*now]
        moved = [one for k, one in enumerate(self._frozen) if any(row[k] for row in rows)]
        self.names = {one.name for one in moved}
        if moved and not self._told:
            self._told = True
            logger.warning(
                "thinwire: the script changes frozen parameters, so rounds average them, too, as long as they change: "
                "%s and %d more, %d bytes", moved[0].name, len(moved) - 1, sum(one.tensor.nbytes for one in moved),
            )  # fmt: skip

    def leave(self, moments: Sequence[Tensor]) -> None:
        """Let what is known by now travel, and these moments."""
        changed = [one.name for one, was in self._own if not torch.equal(_sample(one.now()), was)]
        self._own.clear()
        if changed:
            logger.warning(
                "thinwire: rounds give all ranks rank 0's of buffers that are no running statistics, here %s; if the "
                "mean of one means something, name it in average_buffers=", ", ".join(changed[:4]),
            )  # fmt: skip
        moving = [(one, True) for one in self._frozen if one.name in self.names]
        self._left = [*self._buffers, *moving, *((x, True) for x in moments)]

    def left(self) -> list[tuple[Tensor, bool]]:
        return [(one if isinstance(one, Tensor) else one.now(), mean) for one, mean in self._left]

    def follow(self, names: Sequence[str]) -> bool:
        here = {one.name for one in self._frozen}
        self.names |= here.intersection(names)
        self._seen = [None if one.name in self.names else was for one, was in zip(self._frozen, self._seen)]
        return here.issuperset(names)


def _sample(x: Tensor) -> Tensor:
    """Return the bytes of a thousand elements of a tensor; who averages or replaces one changes nearly all."""
    flat = x.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // 1000)].clone().view(torch.uint8)


def open_channels(services: Services, rounds: Rounds, beside: BuffersAndFrozen, moments: Moments) -> list[Channel]:
    """Return a channel for each round that can be under way at once. All ranks must call it."""
    depth = depths(exchanges for fragment in rounds.fragments for exchanges in fragment.traced())
    depth |= Counter({Scope.WORLD: len(beside.kinds(moments.dtypes))})
    wanted = deepest_of_all(depth, services.gather)
    return [services.channel(f"local {k}", wanted) for k in range(rounds.most_travelling())]


class RoundRunner:
    """Sends, receives and merges fragments. Fragments sent together share a channel; channels are used in turn."""

    def __init__(
        self,
        rounds: Rounds,
        channels: Sequence[RoundChannel],
        beside: BuffersAndFrozen,
        moments: Moments,
        before_leaving: Callable[[], None] = lambda: None,
    ) -> None:
        self._rounds, self.beside, self._moments, self._before = rounds, beside, moments, before_leaving
        self._averages, self._channels, self._next = Averages(), channels, 0
        self._under_way: dict[int, int] = {}
        self._in_vain = Counter[int]()
        self.seconds = 0.0  # that training has waited for fragments

    def turn(self, lr: float = 0.0) -> Iterator[Fragment]:
        """Do what is due after an optimizer step, made or skipped. Yields each fragment before it is waited for."""
        rounds = self._rounds
        yield from self._count(lr)
        rounds.reach()
        while rounds.behind:  # at its own pace, one step here is several of the fastest rank's
            yield from self._count(lr)

    def _count(self, lr: float) -> Iterator[Fragment]:
        self._rounds.stepped(lr)
        yield from self._merge_due()
        if leaving := self._rounds.leaving():
            self._before()
            self.send(leaving)
        yield from self._merge_due()

    def _merge_due(self) -> Iterator[Fragment]:
        for fragment in self._rounds.arriving():
            yield fragment
            self.merge(fragment)

    def finish(self) -> Iterator[Fragment]:
        """Merge what is under way, and average once more. Yields as ``turn`` does."""
        self._before()
        self.beside.look()
        for fragment in sorted(self._rounds.travelling(), key=lambda f: f.due or 0):
            yield fragment
            self.merge(fragment)
        for fragment in self._rounds.fragments:
            rejected = fragment.rejected
            self.send([fragment], last=True)
            yield fragment
            self.merge(fragment)
            if fragment.rejected > rejected:
                raise RuntimeError("finish() has averaged nothing: some rank's weights are not finite")

    def send(self, fragments: Sequence[Fragment], *, last: bool = False) -> None:
        """Start the programs of fragments, in one round of a channel; ``last``: see ``Fragment.send``."""
        if not fragments:
            return
        number, self._next = self._next, (self._next + 1) % len(self._channels)
        programs: list[Program] = []
        names: list[list[str]] = []
        for fragment in fragments:
            self._under_way[fragment.index] = number
            programs += self._rounds.send(fragment, last=last)
            names += fragment.names()
        end = self._rounds.fragments[-1]
        if end in fragments:
            if not last:  # ``finish`` has looked
                self.beside.look(end.state.step)
            self.beside.leave([] if last else self._moments.due(end.state.step + 1))
        if end in fragments and (beside := self.beside.left()):
            programs.append(self._averages.send(beside))
            names.append(["buffers and moments"])
        if end in fragments and not last and (pace := self._rounds.pace) is not None:
            programs.append(pace.send())
            names.append(["speeds"])
        channel = self._channels[number]
        channel.begin(names, programs.__getitem__)
        for index in range(len(programs)):
            channel.ready(index, inline=False)

    def wait(self, fragment: Fragment) -> None:
        """Wait until it has arrived. ``RuntimeError``: it will not."""
        if fragment.index in self._under_way:
            self.seconds += self._channels[self._under_way.pop(fragment.index)].wait()

    def receive(self, fragment: Fragment) -> None:
        if not fragment.received:
            self.wait(fragment)
            self._in_vain[fragment.index] = 0 if fragment.receive() else self._in_vain[fragment.index] + 1
            if self._in_vain[fragment.index] == _IN_VAIN:
                logger.warning(
                    "thinwire: nothing was averaged in the last %d rounds: %s weights were not finite in each. An "
                    "optimizer state that is not finite stays so: restart from a checkpoint",
                    _IN_VAIN, "another rank's" if fragment.sent_finite else "this rank's",
                )  # fmt: skip

    def merge(self, fragment: Fragment) -> None:
        self.receive(fragment)
        end = fragment is self._rounds.fragments[-1]
        if end and self._rounds.pace is not None:
            self._rounds.pace.merge()
        self._rounds.merge(fragment)
        if end:
            self._averages.merge(self.beside.left())

    def snapshot(self) -> list[Tensor]:
        """Wait for all that is under way. Return the buffers that came with it."""
        for fragment in self._rounds.travelling():
            self.receive(fragment)
        return self._averages.snapshot()

    def restore(self, buffers: Sequence[Tensor], frozen: Sequence[str], *, merged: bool) -> None:
        """Take over a snapshot's buffers and names of frozen parameters; ``merged``: put them into the model now."""
        here = self.beside.follow(frozen)
        self.beside.leave([])
        self._averages.restore(buffers if here else [], self.beside.left())
        if merged:
            self._averages.merge(self.beside.left())

    def ledger(self) -> ByteCounter:
        total = ByteCounter()
        for channel in self._channels:
            total.add(channel.ledger)
        return total


class LocalRanks:
    """Local steps of several ranks in one process, by the same lines; sums are exact.

    Look, change ``weights``, then step.
    """

    def __init__(
        self,
        settings: Local,
        weights: Sequence[Mapping[str, Tensor]],
        *,
        dense: Sequence[str] = (),
        topology: Topology | None = None,
        start: int | None = None,
    ) -> None:
        self.topology = topology or Topology(len(weights))
        self.settings, self.weights, self.sent = settings, weights, [0] * len(weights)
        self.rounds = [Rounds(settings, own, dense, r, self.topology, start=start) for r, own in enumerate(weights)]
        self._left: list[list[Program]] = [[] for _ in weights]
        self._travels = [self._travel(rank, rounds) for rank, rounds in enumerate(self.rounds)]

    def _travel(self, rank: int, rounds: Rounds) -> RoundRunner:
        channels = [_Lockstep(self._left[rank])] * rounds.most_travelling()
        return RoundRunner(rounds, channels, BuffersAndFrozen([], [], lambda message: [message]), Moments({}, [], []))

    def look(self) -> None:
        """Look ahead, before gradients are taken at ``weights``."""
        for rounds in self.rounds:
            rounds.look()

    def step(self, lr: float = 0.0) -> None:
        self._together([travel.turn(lr) for travel in self._travels])

    def finish(self) -> None:
        self._together([travel.finish() for travel in self._travels])

    def _together(self, turns: Sequence[Iterator[Fragment]]) -> None:
        for _ in zip(*turns, strict=True):
            self._run()
        self._run()

    def _run(self) -> None:
        for programs in zip(*self._left, strict=True):
            sent = run_lockstep(programs, self.topology)
            self.sent = [a + b for a, b in zip(self.sent, sent)]
        for left in self._left:
            left.clear()
        for travel, rounds in zip(self._travels, self.rounds):
            for fragment in rounds.travelling():
                travel.receive(fragment)


class _Lockstep:
    def __init__(self, left: list[Program]) -> None:
        self._left, self.ledger = left, ByteCounter()

    def begin(self, names: Sequence[Sequence[str]], make: Callable[[int], Program]) -> None:
        self._left += [make(index) for index in range(len(names))]

    def ready(self, index: int, *, inline: bool = True) -> None: ...

    def wait(self) -> float:
        return 0.0
