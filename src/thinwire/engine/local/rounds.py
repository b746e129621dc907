"""What one rank does in rounds of local steps: snapshot, exchange, outer step, merge.

phi     the outer weights, equal on all ranks
send    s = x;  change = phi - s, to which a codec adds its residual; its ``reduce`` gives the mean over ranks
outer   phi <- phi - mean change, or what the outer optimizer makes of it
merge   x <- phi + (x - s): steps made in the meantime stay. Or a mixture of x and phi

While s is under way, a rank undoes by itself some of its deviation at sending, where the loss is steep. Removing all of
the deviation would then swing it to the other side. So a round that is under way for two or more steps removes only
half, and the next round half of the rest: the mean over ranks is the same.

Without codec and outer optimizer the weights themselves are exchanged, because their mean needs no subtraction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from thinwire.core.checks import learning_rate
from thinwire.core.kernels.finite import every_finite
from thinwire.core.methods.start import exact_method, start_method
from thinwire.core.pricing.periods import cut, steps_late
from thinwire.core.program import (
    CROSS,
    NODE,
    WORLD,
    Broadcast,
    Bucket,
    Method,
    Program,
    Slot,
    State,
    Topology,
    working_dtype,
)
from thinwire.core.program.bucket import local_shard
from thinwire.core.program.ops import Collective
from thinwire.core.program.trace import TracedExchange, steady_step, trace, with_rare_rounds
from thinwire.engine.local.host import HostMemory
from thinwire.engine.local.pace import Pace
from thinwire.engine.local.settings import QSR, Local

DEVIATION_KEPT = 0.5
"""Share of a rank's deviation at sending that is kept, in rounds of two or more steps. At a delay of 2 or 3 steps it
hardly matters; at 7 it saves an eighth of the steps: ``benchmarks/late_rounds.py``."""


def across(program: Program) -> Program:
    """Turn a program of all ranks into one among one rank of each machine."""
    value = None
    while True:
        try:
            op = program.send(value)
        except StopIteration:
            return
        if isinstance(op, Collective) and op.group is WORLD:
            op = dataclasses.replace(op, group=CROSS)
        value = yield op


def by_first_ranks(program: Program, bucket: Bucket, *, first: bool) -> Program:
    """Run a bucket's round: each machine's first rank runs the program, and the others receive its result."""
    slots = bucket.slots
    if first:
        yield from across(program)
        flat = torch.cat(
            [(slot.value_or_zeros() if slot.result is None else slot.result).reshape(-1) for slot in slots]
        )
    else:
        program.close()
        flat = torch.empty(bucket.numel, dtype=bucket.dtype, device=slots[0].device)
    flat = yield Broadcast(flat, NODE)
    for slot, piece in zip(slots, flat.split([slot.numel for slot in slots])):
        slot.result = piece.view(slot.shape)


def exchanges_of(program: Sequence[TracedExchange], name: str) -> list[TracedExchange]:
    """Return what a machine's first rank issues for a codec's exchanges; refuse one that exchanges inside machines."""
    if any(one.scope is NODE for one in program):
        raise ValueError(f"{name} exchanges inside machines itself: leave inside= out, or use another codec")
    moved = [dataclasses.replace(one, scope=CROSS) if one.scope is WORLD else one for one in program]
    return [*moved, TracedExchange("Broadcast", NODE, 0, 0)]


class Rounds:
    """The rounds of one rank; what is called after an optimizer step is in ``RoundRunner.turn``.

    ``first``: whether this is its machine's first rank, if the machine's ranks have equal weights; ``rank`` and
    ``topology`` then count machines. ``start``: number of exact rounds before the codec begins; None: as it says.
    ``agree``: if a model is sharded over several ranks, whether a flag of these ranks is true on all of them. ``pace``:
    this rank's own; None: it makes all steps.
    """

    def __init__(
        self,
        settings: Local,
        parameters: Mapping[str, Tensor],
        dense: Sequence[str],
        rank: int,
        topology: Topology,
        *,
        first: bool | None = None,
        start: int | None = None,
        agree: Callable[[Tensor], Tensor] | None = None,
        pace: Pace | None = None,
    ) -> None:
        if len(parameters) < settings.fragments:
            raise ValueError(
                f"fragments={settings.fragments}: the model has only {len(parameters)} trainable parameters"
            )
        self.settings, self.pace = settings, pace
        self.count = self.begun = 0  # steps so far, by the common number; before the present period
        self.total: int | None = None  # steps at which all ranks end
        self.joined = False  # this rank has no data any more, so its steps are empty
        self._reached = 0  # the number to which this rank's last step has brought it
        self.measured: tuple[int, int] | None = None  # the period and the delay chosen from measured times
        self._measures, self._delays = settings.measures(None), dict[Any, int]()
        self.code = settings.first_code
        self.period = 0  # the first period begins with the first step
        self.sent = 0  # fragments so far
        named, sizes = list(parameters.items()), [x.numel() for x in parameters.values()]
        self.host = HostMemory(next(iter(parameters.values())).device, away=settings.anchors == "cpu")
        shared = self.host, first, start, agree
        self.fragments = [
            Fragment(settings, i, dict(named[at.start : at.stop]), set(dense), State(rank, topology), *shared)
            for i, at in enumerate(cut(sizes, settings.fragments))
        ]

    def most_travelling(self) -> int:
        period, count = self.settings.sync_every, len(self.fragments)
        if not isinstance(period, int) or self.settings.warmup_steps:
            return count  # in a period that becomes shorter, each fragment may be sent by itself
        window = steps_late(self.settings.fragment_sync_delay, period) + 1  # "auto" may choose any
        steps = {_offset(f.index, count, period) for f in self.fragments}
        return max(sum((at - step) % period < window for step in steps) for at in steps)

    def rate(self, optimizer: torch.optim.Optimizer) -> float:
        """Return the learning rate if the period follows it, else 0."""
        if not isinstance(self.settings.sync_every, QSR):
            return 0.0
        return float(learning_rate(optimizer, optimizer.param_groups[0], "sync_every=QSR"))

    def stepped(self, lr: float = 0.0) -> None:
        """Count an optimizer step, made or skipped. ``lr``: the learning rate."""
        if self.ends:
            self.begun, every = self.count, self.settings.sync_every
            if not isinstance(every, int) or self.count < self.settings.warmup_steps:
                every = self.settings.period_at(self.count, lr, self.measured)
            self.period = every
            if self.pace is not None:
                self.pace.begin_period(every)
        elif isinstance(self.settings.sync_every, QSR):  # a higher rate ends a period that is too long for it
            shorter = self.settings.period_at(self.count, lr, None)
            self.period = min(self.period, max(shorter, self.count - self.begun + 1))
        self.count += 1

    def reach(self) -> None:
        """Count this rank's own step, after :meth:`stepped` has counted it as one."""
        own = self.pace is not None and self.pace.own and not self.joined
        self._reached = self.begun + self.pace.reached() if own else self.count  # type: ignore[union-attr]

    @property
    def behind(self) -> bool:
        """Whether the common number is still below that to which this rank's last step has brought it."""
        return self.count < (self._reached if self.total is None else min(self._reached, self.total))

    def alone(self) -> None:
        """After a step of the only rank: its own weights are the outer ones."""
        for fragment in self.fragments:
            fragment.alone(self.count)

    def look(self) -> None:
        """Look ahead, before gradients are computed, once after each step."""
        for fragment in self.fragments:
            fragment.look(1 if self.pace is None else self.pace.steps)

    def arriving(self) -> list[Fragment]:
        """Return the fragments to merge now: those that are due, or are to be sent again."""
        return [f for f in self.travelling() if (f.due or 0) <= self.count or (self._leaves(f) and f.left < self.count)]

    def travelling(self) -> list[Fragment]:
        return [f for f in self.fragments if f.due is not None]

    @property
    def measuring(self) -> bool:
        """Whether times are still to be measured, from which the period or delay is chosen: training waits for them."""
        return self._measures and self.measured is None

    @property
    def ends(self) -> bool:
        return self.count - self.begun == self.period

    def leaving(self) -> list[Fragment]:
        return [f for f in self.fragments if self._leaves(f)]

    def _leaves(self, fragment: Fragment) -> bool:
        made, turn = self.count - self.begun, _offset(fragment.index, len(self.fragments), self.period)
        return made == turn or (made > turn and fragment.left <= self.begun)  # in a period that became shorter

    def send(self, fragment: Fragment, *, last: bool = False) -> list[Program]:
        known = self.period, self.measured
        if known not in self._delays:
            self._delays[known] = self.settings.delay_in(*known)
        delay = 0 if last or self.measuring else self._delays[known]
        self.sent += 1
        return fragment.send(self.count, delay, self.code, last=last)

    def merge(self, fragment: Fragment) -> None:
        """Merge a fragment. If this rank's weights were not finite, all return to the outer ones, or it spoils them."""
        if not fragment.merge(self.count, 1.0 if self.pace is None else self.pace.factor):
            for one in self.fragments:
                one.recover()

    @property
    def drifted(self) -> bool:
        """Whether this rank's weights differ from the outer weights."""
        pairs = (pair for f in self.fragments for pair in zip(f.weights, self.host.fetch(f.anchors)))
        return any(not torch.equal(x.to(anchor), anchor) for x, anchor in pairs)

    @property
    def open(self) -> bool:
        """Whether ``finish`` would average steps: made since fragments were sent, or under way."""
        return any(f.due is not None or f.left < self.count for f in self.fragments) and self.drifted

    @contextmanager
    def outer_weights(self) -> Iterator[None]:
        own = [_clones(fragment.weights) for fragment in self.fragments]
        for fragment in self.fragments:
            fragment.return_to_outer_weights()
        try:
            yield
        finally:
            for fragment, values in zip(self.fragments, own):
                for x, value in zip(fragment.weights, values):
                    x.copy_(value)

    def snapshot(self) -> dict[str, Any]:
        """Return all state, cloned. What is under way must have been received."""
        clock = {"count": self.count, "begun": self.begun, "period": self.period}
        found: dict[str, Any] = {"measured": self.measured, "code": self.code}
        if self.pace is not None:
            found["pace"] = self.pace.snapshot()
        return {**clock, **found, "fragments": [fragment.snapshot() for fragment in self.fragments]}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over a snapshot of the same settings and number of ranks; a measurement cut short begins again."""
        self.count = int(saved["count"])
        self.begun, self.period, self.measured = saved["begun"], saved["period"], saved["measured"]
        self.code = self.settings.first_code if self.measuring else saved["code"]
        if self.pace is not None and saved.get("pace") is not None:
            self.pace.restore(saved["pace"])
        for fragment, one in zip(self.fragments, saved["fragments"], strict=True):
            fragment.restore(one)

    def begin_again(self) -> None:
        """Merge what has arrived, and continue from the outer weights: the snapshot is of another number of ranks."""
        self.measured, self.code = None, self.settings.first_code
        for fragment in self.travelling():
            fragment.merge(self.count)
        for fragment in self.fragments:
            fragment.return_to_outer_weights()


class Fragment:
    """A part of the parameters that is exchanged as a whole; its state's steps are its rounds.

    Of sharded parameters, it holds those of which this rank has a part.
    """

    def __init__(
        self,
        settings: Local,
        index: int,
        parameters: Mapping[str, Tensor],
        dense: Container[str],
        state: State,
        host: HostMemory,
        first: bool | None = None,
        start: int | None = None,
        agree: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.elements = sum(x.numel() for x in parameters.values())  # of whole parameters
        self.parameters = {name: x for name, x in parameters.items() if agree is None or local_shard(x).numel()}
        self.index, self.state, self._agree = index, state, agree
        self._settings, self._leads, self._host = settings, first, host
        self._averages, self._codecs = settings.averages, settings.codecs
        self.anchors = [x.to(self._dtype(x.dtype), copy=True) for x in self.weights]  # outer weights
        self.momenta = [torch.zeros_like(x) for x in self.anchors] if settings.outer is not None else []
        look = settings.look is not None
        self.slow = [torch.zeros_like(x) for x in self.anchors] if look else []  # mean change of a step, to look ahead
        self._followed = 0  # the optimizer step after which it was last brought up to date
        self._sent: list[Tensor] = []  # of what is under way: the weights as sent, less the share that is kept
        self._kept = 0.0  # share of this rank's deviation at sending that is kept
        self._mean: list[Tensor] | None = None  # received, and to be merged; None: it was rejected
        self._buckets = self._bucketed(dense)
        self.left = 0  # the optimizer step after which it was sent
        self.due: int | None = None  # the step after which it is merged; None: it is not under way
        self.received = self._last = False
        self.rejected = 0  # rounds that were dropped because something was not finite
        self._exact = exact_method(settings.method)
        self._ending = start_method(settings.method, state.topology, start)
        state.start = settings.method.start_steps if start is None else start
        self._put_away()

    def _move(self, to: Callable[[str, Sequence[Tensor]], list[Tensor]]) -> None:
        """Move what is kept between rounds; on a GPU it is in host memory but for while the fragment is under way."""
        if not self._host.away:
            return
        for kind in ("anchors", "momenta", "slow"):
            setattr(self, kind, to(kind, getattr(self, kind)))
        kept = self.state.residuals
        kept.update(zip(list(kept), to("residuals", list(kept.values()))))

    def _bring(self) -> None:
        self._move(lambda _, tensors: self._host.fetch(tensors))

    def _put_away(self) -> None:
        self._move(lambda kind, tensors: self._host.put_away((self.index, kind), tensors))

    @property
    def weights(self) -> list[Tensor]:
        """What this rank has of the parameters, as it is in the model now."""
        return [local_shard(x).detach() for x in self.parameters.values()]

    def _all(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return whether all are finite, on all ranks of this model."""
        flag = every_finite(tensors) if tensors else torch.ones((), dtype=torch.bool)
        return flag if self._agree is None else self._agree(flag)

    def _dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if self._averages else working_dtype(dtype)

    def _bucketed(self, outside: Container[str]) -> list[tuple[bool, Bucket]]:
        """Return a bucket for each dtype, and more for what is sent without the codec; each with a flag for that."""
        slots: dict[tuple[bool, torch.dtype], list[Slot]] = {}
        for name, x in zip(self.parameters, self.weights):
            dense, dtype = self._settings.codec is None or name in outside, self._dtype(x.dtype)
            slots.setdefault((dense, dtype), []).append(Slot(name, x.shape, None, dtype, x.device))
        return [(dense, Bucket(index, some)) for index, ((dense, _), some) in enumerate(slots.items())]

    def names(self) -> list[list[str]]:
        return [[slot.name for slot in bucket.slots] for _, bucket in self._buckets]

    def coded(self) -> list[tuple[list[tuple[str, tuple[int, ...]]], torch.dtype]]:
        """Return names and shapes of what the codec sends, by dtype."""
        some = [bucket for dense, bucket in self._buckets if not dense]
        return [([(slot.name, tuple(slot.shape)) for slot in bucket.slots], bucket.dtype) for bucket in some]

    def traced(self) -> Iterator[list[TracedExchange]]:
        topology, rank = self.state.topology, self.state.rank
        for dense, bucket in self._buckets:
            shapes = [(slot.name, slot.shape) for slot in bucket.slots]
            for method in {self._exact} if dense else {self._exact, self._ending, *self._codecs}:
                for phase in range(method.phases):
                    step = steady_step(method, phase)
                    one = trace(method, shapes, topology, rank=rank, step=step, dtype=bucket.dtype)
                    found = with_rare_rounds(method, [one])
                    yield from found if self._leads is None else [exchanges_of(x, method.name) for x in found]

    @torch.no_grad()
    def send(self, count: int, delay: int, code: int = 0, *, last: bool = False) -> list[Program]:
        """Begin a round, merged ``delay`` steps after ``count``: one program per bucket; they no longer read weights.

        ``last``: with all residuals and no outer optimizer; in 8 bits, unless codecs have none or ``start`` was named.
        """
        self.left, self.due, self._mean = count, count + delay, None
        self.received, self._last = False, last
        if not self.parameters:
            return []
        self._sent = [x.to(self._dtype(x.dtype), copy=True) for x in self.weights]
        beside = self._host.beside() if self._host.away else nullcontext()
        with beside:  # the programs wait for what is brought, training does not
            self._bring()
            changes = _clones(self._sent) if self._averages else list(torch._foreach_sub(self.anchors, self._sent))
            self._kept = self._share_kept(delay)
            if self._kept:
                torch._foreach_lerp_(self._sent, self.anchors, self._kept)
                self._add_residuals(self._kept)
            given = dict(zip(self.parameters, changes))
            for name in self.state.residuals if last else ():
                given[name].add_(self.state.extended(name, given[name].shape))
        programs = []
        for dense, bucket in self._buckets:
            for slot in bucket.slots:
                slot.value, slot.result = given[slot.name], None
            bucket.renew(None)
            program = self._method(dense, code).reduce(bucket, self.state)
            program = program if self._leads is None else by_first_ranks(program, bucket, first=self._leads)
            programs.append(self._host.before(program) if self._host.away else program)
        return programs

    def _method(self, dense: bool, code: int) -> Method:
        if self._last and not dense:
            return self._ending
        return self._exact if dense or self.state.step < self.state.start else self._codecs[code]

    @torch.no_grad()
    def receive(self) -> bool:
        """Take over the results when all programs have ended. Return whether they are kept; equal on all ranks."""
        means = {
            slot.name: slot.value_or_zeros() if slot.result is None else slot.result
            for _, b in self._buckets
            for slot in b.slots
        }
        ordered = [means[name] for name in self.parameters]
        self.state.verdict(self._all(ordered))
        accepted = self.state.end_step()
        self._mean = ordered if accepted else None
        self.received = True
        if accepted and self._last:
            self.state.residuals.clear()
            self.state.offsets.clear()
        self.rejected += not accepted
        return accepted

    @property
    def starting(self) -> bool:
        """Whether its last round was exact because the codec had not begun."""
        return self.state.step <= self.state.start

    @property
    def sent_finite(self) -> bool:
        """Whether this rank's weights were finite when they were last sent."""
        return bool(self._all(self._sent))

    @torch.no_grad()
    def merge(self, count: int, factor: float = 1.0) -> bool:
        """Make the outer step, and merge. Return False if the weights that this rank sent were not finite.

        ``factor``: of the mean change, if some ranks have made no steps.
        """
        self.due, finite = None, True
        if self._mean is None:
            finite = self.sent_finite
            if not finite:
                self.return_to_outer_weights()
        elif self.parameters:
            self._merge(self.weights, self._mean if factor == 1 or self._last else self._longer(factor), count)
        for _, bucket in self._buckets:
            for slot in bucket.slots:
                slot.value = slot.result = None
            bucket.renew(None)
        self._sent, self._mean = [], None
        self._put_away()
        return finite

    def _longer(self, factor: float) -> list[Tensor]:
        """Return the mean with a change that is as many times as long."""
        assert self._mean is not None
        if self._averages:
            return list(torch._foreach_lerp(self.anchors, self._mean, factor))
        return list(torch._foreach_mul(self._mean, factor))

    def _merge(self, weights: list[Tensor], mean: list[Tensor], count: int) -> None:
        """Make the outer step with the mean change, or the mean of the weights, and bring it to the weights here."""
        if self._kept:
            change = torch._foreach_sub(self.anchors, mean) if self._averages else mean
            torch._foreach_sub_(self._sent, list(change), alpha=self._kept)
            self._add_residuals(-self._kept)
        before = _clones(self.anchors) if self.slow else []
        if self._averages:
            _copy(self.anchors, mean)
        else:
            torch._foreach_sub_(self.anchors, self._outer_step(mean))
        self._follow(before, count)
        alpha = self._settings.fragment_update_alpha
        if self._last:
            _copy(weights, self.anchors)
        elif alpha is None and self.left < count:
            made = list(torch._foreach_sub(weights, self._sent))
            _copy(weights, torch._foreach_add(made, self.anchors))
        elif alpha:
            kept = list(torch._foreach_mul(weights, alpha))
            _copy(weights, torch._foreach_add(kept, self.anchors, alpha=1 - alpha))
        else:
            _copy(weights, self.anchors)

    def look(self, steps: int = 1) -> None:
        """Move weights ahead, as so many steps do, except frozen ones."""
        given = zip(self.parameters.values(), self.weights, self._host.fetch(self.slow))
        pairs = [(x, s) for p, x, s in given if p.requires_grad or not isinstance(p, torch.nn.Parameter)]
        if pairs:
            weights, slow = zip(*pairs)
            self._settings.look.ahead(weights, slow, steps)  # type: ignore[union-attr]

    def _follow(self, before: Sequence[Tensor], count: int) -> None:
        """Take the outer weights' change into the mean that looks ahead."""
        if self.slow and count > self._followed:
            change = torch._foreach_sub(self.anchors, list(before))
            self._settings.look.follow(self.slow, list(change), count - self._followed)  # type: ignore[union-attr]
            self._followed = count

    @torch.no_grad()
    def alone(self, count: int) -> None:
        if self.slow:
            self._bring()
            before = _clones(self.anchors)
            _copy(self.anchors, self.weights)
            self._follow(before, count)
            self._put_away()

    @torch.no_grad()
    def recover(self) -> None:
        """Replace weights that are not finite by the outer weights; if under way, by those that will arrive."""
        if bool(self._all(self.weights)):
            return
        self.return_to_outer_weights()
        if self.due is not None and self.sent_finite:
            _copy(self._sent, self.anchors)  # brought when it was sent
            self._kept = 0.0

    def _share_kept(self, delay: int) -> float:
        """Return the share of the deviation to keep; 0 if a machine's other ranks do not know the residual."""
        unknown = self._leads is not None and self._settings.method.has_residual
        return 0.0 if delay < 2 or unknown or self._settings.fragment_update_alpha is not None else DEVIATION_KEPT

    def _add_residuals(self, share: float) -> None:
        for name, sent in zip(self.parameters, self._sent):
            if name in self.state.residuals:
                sent.add_(self.state.extended(name, sent.shape), alpha=share)

    def _outer_step(self, mean: Sequence[Tensor]) -> list[Tensor]:
        outer = self._settings.outer
        if outer is None or self._last:  # the last round averages: momentum would overshoot
            return list(mean)
        momentum = outer.momentum_at(self.state.step - self.rejected - 1)
        torch._foreach_mul_(self.momenta, momentum)
        torch._foreach_add_(self.momenta, list(mean))
        step = list(torch._foreach_add(list(mean), self.momenta, alpha=momentum))
        torch._foreach_mul_(step, outer.lr)
        return step

    def snapshot(self) -> dict[str, Any]:
        self._host.settle()
        own = [x.to(anchor.dtype, copy=True) for x, anchor in zip(self.weights, self.anchors)]
        return {
            "codec": self.state.snapshot(),
            "rejected": self.rejected,
            "anchors": _clones(self.anchors) if self.state.size > 1 else own,
            "momenta": _clones(self.momenta),
            "slow": _clones(self.slow),
            "followed": self._followed,
            "left": self.left,
            "due": self.due,
            "sent": [] if self.due is None else _clones(self._sent),
            "kept": self._kept,
            "mean": None if self._mean is None else _clones(self._mean),
        }

    @torch.no_grad()
    def return_to_outer_weights(self) -> None:
        _copy(self.weights, self._host.fetch(self.anchors))

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Any]) -> None:
        self._host.settle()
        self.state.restore(saved["codec"])
        self.rejected, self.left, self.due = saved["rejected"], saved["left"], saved["due"]
        self.received, self._last = self.due is not None, False
        for held, kept in ((self.anchors, "anchors"), (self.momenta, "momenta"), (self.slow, "slow")):
            for own, value in zip(held, saved.get(kept, []), strict=True):
                own.copy_(value)
        self._followed = saved.get("followed", 0)
        sent = saved["sent"] or ([] if self.due is None else self.anchors)  # begun again, it needs none of its own
        self._sent = [x.to(w.device, copy=True) for x, w in zip(sent, self.weights)]
        self._kept = saved["kept"]
        mean = saved["mean"]
        self._mean = None if mean is None else [x.to(w.device, copy=True) for x, w in zip(mean, self.weights)]
        if self.due is None:
            self._put_away()
        else:
            self._bring()


def _copy(to: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    if to:
        torch._foreach_copy_(list(to), list(values))


def _clones(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach().clone() for x in tensors]


def _offset(fragment: int, fragments: int, period: int) -> int:
    return (fragment + 1) * period // fragments or period
