"""What one rank does in rounds of local steps: snapshot, exchange, outer step, merge.

phi     the outer weights, equal on all ranks
send    s = x;  change = phi - s, to which a codec adds its residual; its ``reduce`` gives the mean over ranks
outer   phi <- phi - mean change, or what the outer optimizer makes of it
merge   x <- phi + (x - s): steps that were made meanwhile stay. Or a share of x beside phi

While s travels a rank undoes by itself some of what set it apart when it was sent, where the loss is steep. Taking out
all of that then would swing it to the other side. So of rounds that are two steps and more under way only half is taken
out, and the next round takes half of the rest: the mean over ranks is the same.

Without codec and outer optimizer the weights are exchanged themselves, as their mean needs no subtraction.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from thinwire.local.machine import by_first_ranks, exchanges_of
from thinwire.local.settings import QSR, Local
from thinwire.methods.base import all_finite
from thinwire.methods.start import exact_method
from thinwire.planner.calendars import calendar, cut, layers
from thinwire.planner.periods import steps_late
from thinwire.program import Bucket, Program, Slot, State, Topology, working_dtype
from thinwire.program.trace import TracedExchange, steady_step, trace, with_rare_rounds

KEPT = 0.5
"""Of what set a rank apart when it sent, in rounds of two steps and more. At a delay of 2 or 3 steps it hardly matters,
at 7 it saves an eighth of the steps: ``benchmarks/late_rounds.py``."""


class Rounds:
    """Of one rank.

    After every optimizer step whoever drives it calls :meth:`stepped`, :meth:`merge` with each fragment of
    :meth:`arriving`, and runs the programs of each of :meth:`leaving`.

    Args:
        settings: equal on all ranks.
        parameters: by name, in an order that is equal on all ranks.
        dense: names of those whose change travels outside the codec.
        rank: this one.
        topology: of all.
        first: of its machine, whose ranks have equal weights: ``rank`` and ``topology`` count machines then. None:
            every rank is by itself.
        start: rounds that are exact before the codec begins; None: as it says itself.

    Attributes:
        count: optimizer steps so far.
        begun: of them, those before the present period.
        period: its steps.
        measured: the period and the delay that follow from measured times; None: none yet.
        code: which of the settings' codecs runs.
        fragments: parts of the parameters.
        calendar: those that leave after each step of a period; of strided ones, empty.
        trial: whether it is only tried.
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
    ) -> None:
        if len(parameters) < settings.fragments:
            raise ValueError(
                f"fragments={settings.fragments}: the model has only {len(parameters)} trainable parameters"
            )
        self.settings, self.count, self.begun = settings, 0, 0
        self.measured: tuple[int, int] | None = None
        self.code = 0
        self.period = 0  # the first one begins with the first step
        named = list(parameters.items())
        sizes, every = [x.numel() for x in parameters.values()], settings.sync_every
        self.trial = False
        if settings.schedule == "dream" and isinstance(every, int):
            parts = layers(list(parameters), sizes, every)
        else:
            parts = list(cut(sizes, settings.fragments))
        self.fragments = [
            Fragment(settings, i, dict(named[at.start : at.stop]), set(dense), State(rank, topology), first, start)
            for i, at in enumerate(parts)
        ]
        self.calendar = self._first_calendar()

    def _first_calendar(self) -> list[list[int]]:
        """By the fragments' sizes, until their times are known; empty: they are strided."""
        every = self.settings.sync_every
        if self.settings.schedule != "dream" or not isinstance(every, int):
            return []
        return calendar([sum(x.numel() for x in f.parameters.values()) for f in self.fragments], [0] * every)

    def most_travelling(self) -> int:
        """How many sets of fragments that left together are on their way at a time, at most."""
        period, count = self.settings.sync_every, len(self.fragments)
        if not isinstance(period, int) or (self.settings.warmup_steps and not self.calendar):
            return count  # in a period that becomes shorter each may leave by itself
        delay = steps_late(self.settings.fragment_sync_delay, period)  # "auto" may find any
        if self.calendar:
            return delay  # something may leave after every step, before which what is due is merged
        window = delay + 1
        steps = {_offset(f.index, count, period) for f in self.fragments}
        return max(sum((at - step) % period < window for step in steps) for at in steps)

    def follow(self, exchanges: Sequence[int], window: int, *, again: bool, trial: bool = False) -> None:
        """Another calendar, from the next period on: fragments stay as they are.

        Args:
            exchanges: time of each fragment's, equal on all ranks.
            window: time of a step, in the same unit.
            again: fragments leave more than once where there is time.
            trial: it is tried.
        """
        every = len(self.calendar)
        delay = self.settings.delay_in(every)
        self.calendar = calendar(exchanges, [window] * every, apart=delay if again else None)
        self.measured, self.trial = None if trial else (every, delay), trial

    def stepped(self, lr: float = 0.0) -> None:
        """The optimizer has stepped, or was kept from it. ``lr``: its learning rate."""
        if self.ends:
            self.begun, self.period = self.count, self.settings.period_at(self.count, lr, self.measured)
        elif isinstance(self.settings.sync_every, QSR):  # a rate that has risen ends a period that is too long for it
            shorter = self.settings.period_at(self.count, lr, None)
            self.period = min(self.period, max(shorter, self.count - self.begun + 1))
        self.count += 1

    def arriving(self) -> list[Fragment]:
        """What is to be merged now: its time has come, or it is to be sent again."""
        return [f for f in self.travelling() if (f.due or 0) <= self.count or (self._leaves(f) and f.left < self.count)]

    def travelling(self) -> list[Fragment]:
        """What was sent and is not merged."""
        return [f for f in self.fragments if f.due is not None]

    @property
    def waited(self) -> bool:
        """Whether exchanges are waited for, as their times are wanted."""
        return self.settings.measures(self.measured) and not self.trial

    @property
    def ends(self) -> bool:
        """Whether the period ends with the step that was counted last."""
        return self.count - self.begun == self.period

    def leaving(self) -> list[Fragment]:
        """What is to be sent now."""
        return [f for f in self.fragments if self._leaves(f)]

    def _leaves(self, fragment: Fragment) -> bool:
        made, turns = self.count - self.begun, self._turns(fragment)
        return made in turns or (made > turns[0] and fragment.left <= self.begun)  # the period has become shorter

    def _turns(self, fragment: Fragment) -> list[int]:
        """After which of a period's steps, from 1, a fragment leaves."""
        if self.period == len(self.calendar):
            return [step for step, leaving in enumerate(self.calendar, 1) if fragment.index in leaving]
        return [_offset(fragment.index, len(self.fragments), self.period)]

    def send(self, fragment: Fragment, *, last: bool = False) -> list[Program]:
        """As :meth:`Fragment.send`, after the optimizer step that was counted last."""
        delay = 0 if last or self.waited else self.settings.delay_in(self.period, self.measured)
        return fragment.send(self.count, delay, self.code, last=last)

    def merge(self, fragment: Fragment) -> None:
        """Take over what has come, after the step that was counted last.

        Of a rank that was not finite all fragments go on from the outer weights: one left as it is would spoil the
        others in the next step.
        """
        if not fragment.merge(self.count):
            for one in self.fragments:
                one.recover()

    @property
    def apart(self) -> bool:
        """Whether this rank's weights are not the outer weights."""
        pairs = (pair for f in self.fragments for pair in zip(f.parameters.values(), f.anchors))
        return any(not torch.equal(x.detach().to(anchor.dtype), anchor) for x, anchor in pairs)

    @contextmanager
    def outer_weights(self) -> Iterator[None]:
        """Put the outer weights into the model; afterwards it has its own again."""
        own = [(x, x.detach().clone()) for fragment in self.fragments for x in fragment.parameters.values()]
        with torch.no_grad():
            for fragment in self.fragments:
                for x, anchor in zip(fragment.parameters.values(), fragment.anchors):
                    x.copy_(anchor)
        try:
            yield
        finally:
            with torch.no_grad():
                for x, value in own:
                    x.copy_(value)

    def snapshot(self) -> dict[str, Any]:
        """All that is remembered, cloned. What travels must have been received."""
        clock = {"count": self.count, "begun": self.begun, "period": self.period}
        found = {"measured": self.measured, "code": self.code, "calendar": [list(leaving) for leaving in self.calendar]}
        return {**clock, **found, "fragments": [fragment.snapshot() for fragment in self.fragments]}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over a snapshot of the same settings and number of ranks; what was half measured is measured again."""
        self.count = int(saved["count"])
        self.begun, self.period, self.measured = saved["begun"], saved["period"], saved["measured"]
        self.code = 0 if self.settings.measures(self.measured) else saved["code"]
        self.calendar = [list(leaving) for leaving in saved["calendar"]]
        self.trial = False
        for fragment, one in zip(self.fragments, saved["fragments"], strict=True):
            fragment.restore(one)

    def begin_again(self) -> None:
        """Merge what has come, and go on from the outer weights: what is restored was another number of ranks'.

        What their times said is measured anew.
        """
        self.measured, self.code, self.calendar = None, 0, self._first_calendar()
        for fragment in self.travelling():
            fragment.merge(self.count)
        for fragment in self.fragments:
            fragment.return_to_outer_weights()


class Fragment:
    """A part of the parameters that is exchanged at a time.

    Args:
        settings: of all fragments.
        index: which it is.
        parameters: by name.
        dense: names of those whose change travels outside the codec.
        state: of the codec; its steps are this fragment's rounds.
        first, start: as of ``Rounds``.

    Attributes:
        anchors: the outer weights, in the order of ``parameters``.
        momenta: of the outer optimizer, likewise.
        left: the optimizer step after which it was sent.
        due: the one after which it is merged; None: it does not travel.
        received: what travelled has come, and waits for its step.
        rejected: rounds of which nothing was kept, as something was not finite.
    """

    def __init__(
        self,
        settings: Local,
        index: int,
        parameters: Mapping[str, Tensor],
        dense: Container[str],
        state: State,
        first: bool | None = None,
        start: int | None = None,
    ) -> None:
        self.index, self.parameters, self.state = index, dict(parameters), state
        self._settings, self._first = settings, first
        tensors = self.parameters.values()
        self.anchors = [x.detach().to(self._dtype(x.dtype), copy=True) for x in tensors]
        momentum = settings.outer is not None
        self.momenta = [torch.zeros_like(x) for x in self.anchors] if momentum else []
        self._sent = [torch.zeros_like(x) for x in self.anchors]  # the weights as they were sent, less what is kept
        self._kept = 0.0  # of what set this rank apart then
        self._mean: list[Tensor] | None = None  # has been received, and is to be merged; None: it was rejected
        self._buckets = self._bucketed(dense)
        self.left = 0
        self.due: int | None = None
        self.received = self._last = False
        self.rejected = 0
        self._exact = exact_method(settings.method)
        state.start = settings.method.start_steps if start is None else start

    def _dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if self._settings.averages else working_dtype(dtype)

    def _bucketed(self, outside: Container[str]) -> list[tuple[bool, Bucket]]:
        """One bucket for each dtype, and one more for what stays outside the codec; with the answer to which it is."""
        slots: dict[tuple[bool, torch.dtype], list[Slot]] = {}
        for name, anchor in zip(self.parameters, self.anchors):
            dense = self._settings.codec is None or name in outside
            slot = Slot(name, anchor.shape, None, anchor.dtype, anchor.device)
            slots.setdefault((dense, anchor.dtype), []).append(slot)
        return [(dense, Bucket(index, some)) for index, ((dense, _), some) in enumerate(slots.items())]

    def names(self) -> list[list[str]]:
        """Of what the programs of a round carry, in their order."""
        return [[slot.name for slot in bucket.slots] for _, bucket in self._buckets]

    def traced(self) -> Iterator[list[TracedExchange]]:
        """The exchanges of every program that a round may run."""
        topology, rank = self.state.topology, self.state.rank
        for dense, bucket in self._buckets:
            shapes = [(slot.name, slot.shape) for slot in bucket.slots]
            for method in {self._exact} if dense else {self._exact, *self._settings.codecs}:
                for phase in range(method.phases):
                    step = steady_step(method, phase)
                    one = trace(method, shapes, topology, rank=rank, step=step, dtype=bucket.dtype)
                    found = with_rare_rounds(method, [one])
                    yield from found if self._first is None else [exchanges_of(x, method.name) for x in found]

    @torch.no_grad()
    def send(self, count: int, delay: int, code: int = 0, *, last: bool = False) -> list[Program]:
        """Begin a round after the optimizer step of this number: one program a bucket, which no longer read weights.

        What comes is merged ``delay`` steps later. ``code``: which of the settings' codecs. ``last``: an exact round,
        with all that is owed and no outer optimizer, after which the weights are the outer weights.
        """
        self.left, self.due, self._mean = count, count + delay, None
        self.received, self._last = False, last
        torch._foreach_copy_(self._sent, [x.detach() for x in self.parameters.values()])
        if self._settings.averages:
            changes = [x.clone() for x in self._sent]
        else:
            changes = list(torch._foreach_sub(self.anchors, self._sent))
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
            exact = last or dense or self.state.step < self.state.start
            program = (self._exact if exact else self._settings.codecs[code]).reduce(bucket, self.state)
            programs.append(program if self._first is None else by_first_ranks(program, bucket, first=self._first))
        return programs

    @torch.no_grad()
    def receive(self) -> bool:
        """All programs of the round have ended. Returns whether what came is kept, which is equal on all ranks."""
        means = {
            slot.name: slot.raw() if slot.result is None else slot.result for _, b in self._buckets for slot in b.slots
        }
        ordered = [means[name] for name in self.parameters]
        self.state.verdict(torch.stack([all_finite(x) for x in ordered]).all())
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
        """Whether its last round was exact, as the codec had not begun."""
        return self.state.step <= self.state.start

    @property
    def sent_finite(self) -> bool:
        """Whether the weights of this rank were finite as they were sent last."""
        return all(bool(all_finite(x)) for x in self._sent)

    @torch.no_grad()
    def merge(self, count: int) -> bool:
        """The outer step on what was received, and its way into the weights, after the step of this number.

        Returns whether this rank may keep its own: False where it has sent what is not finite.
        """
        self.due = None
        weights = [x.detach() for x in self.parameters.values()]
        if self._mean is None:
            finite = self.sent_finite
            if not finite:
                self.return_to_outer_weights()
            return finite
        mean, self._mean = self._mean, None
        if self._kept:
            change = torch._foreach_sub(self.anchors, mean) if self._settings.averages else mean
            torch._foreach_sub_(self._sent, list(change), alpha=self._kept)
            self._add_residuals(-self._kept)
        if self._settings.averages:
            torch._foreach_copy_(self.anchors, mean)
        else:
            torch._foreach_sub_(self.anchors, self._outer_step(mean))
        alpha = self._settings.fragment_update_alpha
        if self._last:
            torch._foreach_copy_(weights, self.anchors)
        elif alpha is None and self.left < count:
            made = list(torch._foreach_sub(weights, self._sent))
            torch._foreach_copy_(weights, torch._foreach_add(made, self.anchors))
        elif alpha:
            kept = list(torch._foreach_mul(weights, alpha))
            torch._foreach_copy_(weights, torch._foreach_add(kept, self.anchors, alpha=1 - alpha))
        else:
            torch._foreach_copy_(weights, self.anchors)
        for _, bucket in self._buckets:
            for slot in bucket.slots:
                slot.value = slot.result = None
        return True

    @torch.no_grad()
    def recover(self) -> None:
        """Go on from the outer weights, if the weights are not finite; from those that come, if it travels."""
        if all(bool(all_finite(x.detach())) for x in self.parameters.values()):
            return
        self.return_to_outer_weights()
        if self.due is not None and self.sent_finite:
            torch._foreach_copy_(self._sent, self.anchors)
            self._kept = 0.0

    def _share_kept(self, delay: int) -> float:
        """Of what sets this rank apart; none where the ranks of a machine do not know its first one's residual."""
        unknown = self._first is not None and self._settings.method.has_residual
        return 0.0 if delay < 2 or unknown or self._settings.fragment_update_alpha is not None else KEPT

    def _add_residuals(self, share: float) -> None:
        for name, sent in zip(self.parameters, self._sent):
            if name in self.state.residuals:
                sent.add_(self.state.extended(name, sent.shape), alpha=share)

    def _outer_step(self, mean: Sequence[Tensor]) -> list[Tensor]:
        outer = self._settings.outer
        if outer is None or self._last:  # the last one averages: momentum would go past it
            return list(mean)
        momentum = outer.momentum_at(self.state.step - self.rejected - 1)
        torch._foreach_mul_(self.momenta, momentum)
        torch._foreach_add_(self.momenta, list(mean))
        step = list(torch._foreach_add(list(mean), self.momenta, alpha=momentum))
        torch._foreach_mul_(step, outer.lr)
        return step

    def snapshot(self) -> dict[str, Any]:
        """Cloned; what travels must have been received."""
        return {
            "codec": self.state.snapshot(),
            "rejected": self.rejected,
            "anchors": self._outer_weights(),
            "momenta": _clones(self.momenta),
            "left": self.left,
            "due": self.due,
            "sent": [] if self.due is None else _clones(self._sent),
            "kept": self._kept,
            "mean": None if self._mean is None else _clones(self._mean),
        }

    def _outer_weights(self) -> list[Tensor]:
        if self.state.size > 1:
            return _clones(self.anchors)
        return [x.detach().to(anchor.dtype, copy=True) for x, anchor in zip(self.parameters.values(), self.anchors)]

    @torch.no_grad()
    def return_to_outer_weights(self) -> None:
        """Give up what this rank has learnt since its last round."""
        torch._foreach_copy_([x.detach() for x in self.parameters.values()], self.anchors)

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over a snapshot of a fragment with the same parameters."""
        self.state.restore(saved["codec"])
        self.rejected, self.left, self.due = saved["rejected"], saved["left"], saved["due"]
        self.received, self._last = self.due is not None, False
        for own, value in zip([*self.anchors, *self.momenta], [*saved["anchors"], *saved["momenta"]], strict=True):
            own.copy_(value)
        for own, value in zip(self._sent, saved["sent"]):
            own.copy_(value)
        self._kept = saved.get("kept", 0.0)  # a file from before there was such a share
        mean = saved["mean"]
        self._mean = None if mean is None else [x.to(a.device, copy=True) for x, a in zip(mean, self.anchors)]


def _clones(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach().clone() for x in tensors]


def _offset(fragment: int, fragments: int, period: int) -> int:
    """After which of a period's steps, from 1, a fragment leaves."""
    return (fragment + 1) * period // fragments or period
