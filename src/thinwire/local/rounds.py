"""What one rank does in rounds of local steps: snapshot, exchange, outer step, merge.

phi     the outer weights, equal on all ranks
send    s = x;  change = phi - s, to which a codec adds its residual; its ``reduce`` gives the mean over ranks
outer   phi <- phi - mean change, or what the outer optimizer makes of it
merge   x <- phi + (x - s): steps that were made meanwhile stay. Or a share of x beside phi

Without codec and outer optimizer the weights are exchanged themselves, as their mean needs no subtraction.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from thinwire.local.settings import Local
from thinwire.methods.base import all_finite
from thinwire.methods.ssgd import SSGD
from thinwire.program import Bucket, Program, Slot, State, Topology, working_dtype
from thinwire.program.trace import TracedExchange, steady_step, trace, with_rare_rounds


class Rounds:
    """Of one rank.

    After every optimizer step whoever drives it calls :meth:`stepped`, merges each fragment of :meth:`arriving`, and
    runs the programs of each of :meth:`leaving`.

    Args:
        settings: equal on all ranks.
        parameters: by name, in an order that is equal on all ranks.
        dense: names of those whose change travels outside the codec.
        rank: this one.
        topology: of all.
        start: rounds that are exact before the codec begins; None: as it says itself.

    Attributes:
        count: optimizer steps so far.
        fragments: parts of the parameters.
    """

    def __init__(
        self,
        settings: Local,
        parameters: Mapping[str, Tensor],
        dense: Sequence[str],
        rank: int,
        topology: Topology,
        *,
        start: int | None = None,
    ) -> None:
        if len(parameters) < settings.fragments:
            raise ValueError(
                f"fragments={settings.fragments}: the model has only {len(parameters)} trainable parameters"
            )
        self.settings, self.count = settings, 0
        named = list(parameters.items())
        parts = cut([x.numel() for _, x in named], settings.fragments)
        self.fragments = [
            Fragment(settings, index, dict(named[places.start : places.stop]), set(dense), State(rank, topology))
            for index, places in enumerate(parts)
        ]
        if start is not None:
            for fragment in self.fragments:
                fragment.state.start = start

    def most_travelling(self) -> int:
        """How many fragments are on their way at a time, at most."""
        settings, most = self.settings, 1
        for count in range(settings.sync_every):
            window = range(count - settings.fragment_sync_delay + 1, count + 1)
            most = max(most, sum(settings.leaves(c, f.index) for c in window for f in self.fragments))
        return most

    def stepped(self) -> None:
        """The optimizer has stepped, or was kept from it."""
        self.count += 1

    def arriving(self) -> list[Fragment]:
        """What is to be merged now."""
        return [f for f in self.fragments if f.due is not None and f.due <= self.count]

    def travelling(self) -> list[Fragment]:
        """What was sent and is not merged."""
        return [f for f in self.fragments if f.due is not None]

    def leaving(self) -> list[Fragment]:
        """What is to be sent now."""
        return [f for f in self.fragments if self.settings.leaves(self.count, f.index)]

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
        return {"count": self.count, "fragments": [fragment.snapshot() for fragment in self.fragments]}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over a snapshot of the same settings and number of ranks."""
        self.count = int(saved["count"])
        for fragment, one in zip(self.fragments, saved["fragments"], strict=True):
            fragment.restore(one)

    def begin_again(self) -> None:
        """Merge what has come, and go on from the outer weights: what is restored was another number of ranks'."""
        for fragment in self.travelling():
            fragment.merge()
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

    Attributes:
        anchors: the outer weights, in the order of ``parameters``.
        momenta: of the outer optimizer, likewise.
        due: the optimizer step after which it is merged; None: it does not travel.
        received: what travelled has come, and waits for its step.
        rejected: rounds of which nothing was kept, as something was not finite.
    """

    def __init__(
        self, settings: Local, index: int, parameters: Mapping[str, Tensor], dense: Container[str], state: State
    ) -> None:
        self.index, self.parameters, self.state = index, dict(parameters), state
        self._settings = settings
        tensors = self.parameters.values()
        self.anchors = [x.detach().to(self._dtype(x.dtype), copy=True) for x in tensors]
        momentum = settings.outer is not None
        self.momenta = [torch.zeros_like(x) for x in self.anchors] if momentum else []
        self._sent = [torch.zeros_like(x) for x in self.anchors]  # the weights as they were sent
        self._mean: list[Tensor] | None = None  # has been received, and is to be merged; None: it was rejected
        self._buckets = self._bucketed(dense)
        self.due: int | None = None
        self.received = self._last = False
        self.rejected = 0
        self._codec = settings.codec or SSGD()
        self._exact = self._codec.dense_method() or SSGD(deterministic=self._codec.deterministic)
        state.start = self._codec.exact_start

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
            for method in {self._exact, self._exact if dense else self._codec}:
                for phase in range(method.phases):
                    step = steady_step(method, phase)
                    one = trace(method, shapes, topology, rank=rank, step=step, dtype=bucket.dtype)
                    yield from with_rare_rounds(method, [one])

    @torch.no_grad()
    def send(self, count: int, *, last: bool = False) -> list[Program]:
        """Begin a round after the optimizer step of this number: one program a bucket, which no longer read weights.

        ``last``: an exact one, with all that is owed, after which the weights are the outer weights.
        """
        self.due, self._mean = count + (0 if last else self._settings.fragment_sync_delay), None
        self.received, self._last = False, last
        torch._foreach_copy_(self._sent, [x.detach() for x in self.parameters.values()])
        if self._settings.averages:
            changes = [x.clone() for x in self._sent]
        else:
            changes = list(torch._foreach_sub(self.anchors, self._sent))
        given = dict(zip(self.parameters, changes))
        for name in self.state.residuals if last else ():
            given[name].add_(self.state.extended(name, given[name].shape))
        programs = []
        for dense, bucket in self._buckets:
            for slot in bucket.slots:
                slot.value, slot.result = given[slot.name], None
            bucket.renew(None)
            exact = last or dense or self.state.step < self.state.start
            programs.append((self._exact if exact else self._codec).reduce(bucket, self.state))
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

    @torch.no_grad()
    def merge(self) -> None:
        """The outer step on what was received, and its way into the weights."""
        self.due = None
        weights = [x.detach() for x in self.parameters.values()]
        if self._mean is None:
            if not all(bool(all_finite(x)) for x in self._sent):
                torch._foreach_copy_(weights, self.anchors)
            return
        mean, self._mean = self._mean, None
        if self._settings.averages:
            torch._foreach_copy_(self.anchors, mean)
        else:
            torch._foreach_sub_(self.anchors, self._outer_step(mean))
        alpha = self._settings.fragment_update_alpha
        if self._last:
            torch._foreach_copy_(weights, self.anchors)
        elif alpha is None and self._settings.fragment_sync_delay:
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

    def _outer_step(self, mean: Sequence[Tensor]) -> list[Tensor]:
        outer = self._settings.outer
        if outer is None:
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
            "due": self.due,
            "sent": [] if self.due is None else _clones(self._sent),
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
        self.rejected, self.due = saved["rejected"], saved["due"]
        self.received, self._last = self.due is not None, False
        for own, value in zip([*self.anchors, *self.momenta], [*saved["anchors"], *saved["momenta"]], strict=True):
            own.copy_(value)
        for own, value in zip(self._sent, saved["sent"]):
            own.copy_(value)
        mean = saved["mean"]
        self._mean = None if mean is None else [x.to(a.device, copy=True) for x, a in zip(mean, self.anchors)]


def _clones(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach().clone() for x in tensors]


def cut(sizes: Sequence[int], count: int) -> Iterator[range]:
    """Runs of consecutive places, cut where the sum passes the next count-th of all elements; none is empty."""
    total, seen, made, begin = sum(sizes), 0, 0, 0
    for place, size in enumerate(sizes):
        seen += size
        left = len(sizes) - place - 1
        full = seen * count >= total * (made + 1) or left == count - made - 1
        if full and made < count - 1:
            yield range(begin, place + 1)
            begin, made = place + 1, made + 1
    yield range(begin, len(sizes))
