"""LocalSync: what ``attach`` returns for local steps. Optimizer steps trigger rounds; gradients are left alone."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.core.collectives.exchange import Ledger
from thinwire.core.program import Method, Program, Scope, State, Topology
from thinwire.core.program.ops import own_modes
from thinwire.core.program.trace import depths
from thinwire.engine.attached import forget, remember
from thinwire.engine.calendar_times import CalendarTimes
from thinwire.engine.late_parameters import LateParameters
from thinwire.engine.local.buffers import Averages, Moments
from thinwire.engine.local.rounds import Fragment, Rounds
from thinwire.engine.local.settings import Local
from thinwire.engine.parameters import Managed, Named, buffers_of, frozen_of, model_facts, sent_at_start
from thinwire.engine.ranks.agreement import deepest_of_all
from thinwire.engine.ranks.communicator import Communicator
from thinwire.engine.round_times import RoundTimes
from thinwire.engine.services import Services
from thinwire.engine.session import Session
from thinwire.engine.settings import AttachSettings
from thinwire.engine.state import local_persistence
from thinwire.engine.state.scaler import SkippedSteps
from thinwire.engine.state.step_watch import owned
from thinwire.engine.stats import Stats
from thinwire.engine.sync import GradientSync

logger = logging.getLogger("thinwire")
_IN_VAIN = 3  # consecutive dropped rounds of a fragment after which to warn: more than an accident of one step
_UNCOUNTED = 100  # consecutive optimizer steps that did not count, after which to warn: a critic makes fewer


class LocalSync:
    """Averages the weights of several ranks' models every few steps. Made by :func:`thinwire.attach`.

    Attributes:
        services: what other packages use of it.
        settings: the ``Local`` that was asked for.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        local: Local,
        managed: list[Managed],
        comm: Communicator | None,
        topology: Topology,
        settings: AttachSettings,
        inner: GradientSync | None,
    ) -> None:
        state = State(0 if comm is None else comm.rank, topology)
        self._travel: Travel | None = None
        self._session = Session(
            local.method, comm, state, None, dict, start=0, before_step=self._watch, after_step=self._stepped
        )
        self._parameters = {id(m.parameter): m for m in managed}
        self._late, self.settings = LateParameters(model), local
        self.services = Services(model, optimizers, managed[0].device, self._session, None, None)
        self._steps, self._lent = _Steps(optimizers), False
        self._handles: list[Any] = []
        weights, dense = {m.name: m.parameter for m in managed}, [m.name for m in managed if m.dense]
        self._inner = inner
        if comm is not None:
            options = {"start_compression_step": settings.start_compression_step, "local steps": repr(local)}
            shared = {"topology": list(topology.layout), "broadcast_buffers": settings.broadcast_buffers}
            shared["detect_desync"] = settings.detect_desync
            comm.agree(options | shared | model_facts(model, managed))
            comm.broadcast(sent_at_start(model))
        start, rank, apart, first = settings.start_compression_step, state.rank, topology, None
        if inner is not None:
            first = topology.local_rank(rank) == 0
            rank, apart = topology.node_of(rank), Topology(topology.nodes)
        if comm is not None and isinstance(local.codec, Method):
            local = dataclasses.replace(local, codec=comm.fit(local.codec))
        self._rounds = Rounds(local, weights, dense, rank, apart, first=first, start=start)
        if comm is not None:
            moments = Moments(dict(local.moments), optimizers, weights.values())
            buffers = buffers_of(model) if settings.broadcast_buffers else []
            beside = Beside(buffers, frozen_of(model, weights), self.services)
            try:
                self._travel = Travel(self.services, self._rounds, beside, moments, settings.detect_desync)
            except Exception as error:  # a rank was lost meanwhile: the channels made so far have threads
                self._session.give_up(str(error))
                self.services.close()
                raise
        self._handles.append(SkippedSteps(self._skipped))
        remember(model, self)

    # --- hooks ---------------------------------------------------------------------------------------------------

    def _watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Check a step; called before a step of any optimizer of the process."""
        if not owned(optimizer, self._parameters) or not self._steps.begins(optimizer) or self._travel is None:
            return
        self._session.check_usable()
        if self._lent:
            raise RuntimeError(
                "optimizer.step() inside outer_weights() would train weights that are only lent: call it outside"
            )
        self._late.check(optimizer, self._parameters)
        self._tell_loaded()

    def _tell_loaded(self) -> None:
        """Warn at the first step if weights were changed after ``attach``, for example loaded from a file."""
        if self._rounds.count or self._steps.waiting or self._travel is None or self.settings.averages:
            return
        if self._rounds.apart:
            logger.warning(
                "thinwire: weights were changed after attach, before the first step: that change is averaged as if the "
                "model had learnt it, through the codec and the outer optimizer. Load weights before attach, or a "
                "complete checkpoint with thinwire.checkpoint.load"
            )

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step; called after a step of any optimizer of the process."""
        if self._steps.ends(optimizer):
            self._count(optimizer)

    def _skipped(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step that a GradScaler skipped: the other ranks count it too."""
        if owned(optimizer, self._parameters):
            self._tell_loaded()
            self._count(optimizer)

    def _count(self, optimizer: torch.optim.Optimizer) -> None:
        if self._steps.counts(optimizer):
            with own_modes():
                self._counted()

    def _counted(self) -> None:
        rounds, travel, session = self._rounds, self._travel, self._session
        if travel is not None:
            travel.times.stepped()
        rounds.stepped(self._lr)
        session.state.step = rounds.count
        if travel is None:
            return
        session.counters.sent(sum(m.parameter.nbytes for m in self._parameters.values()), session.state.size)
        for fragment in rounds.arriving():
            travel.merge(fragment)
        travel.leave(rounds.leaving())
        for fragment in rounds.arriving():
            travel.merge(fragment)
        travel.times.exchanged()
        if rounds.ends and self.settings.measures(rounds.measured):
            if rounds.calendar:
                travel.times.said = travel.layers.ended(rounds, travel.times)
            else:
                starting = any(fragment.starting for fragment in rounds.fragments)
                rounds.measured, rounds.code = travel.times.period(self.settings, starting=starting)

    # --- what users call -----------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate: average nothing inside machines. Without ``inside``, backward exchanges nothing anyway."""
        with contextlib.nullcontext() if self._inner is None else self._inner.no_sync():
            yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Clip as ``torch.nn.utils.clip_grad_norm_`` does; gradients are this rank's own, or its machine's."""
        parameters = [m.parameter for m in self._parameters.values()]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)

    @contextmanager
    def outer_weights(self) -> Iterator[None]:
        """Put the outer weights, which are equal on all ranks, into the model temporarily: to evaluate or to save.

        Afterwards the model has this rank's own weights again, and training continues from these.
        """
        if self._travel is None:
            yield
            return
        lent, self._lent = self._lent, True
        try:
            # Before the first step the outer weights are the model's, even if they were loaded after attach.
            with self._rounds.outer_weights() if self._rounds.count else contextlib.nullcontext():
                yield
        finally:
            self._lent = lent

    def finish(self) -> None:
        """Merge what is under way, and average once more: then all ranks have the same weights.

        All ranks must call it, after the last step. The outer optimizer is not used. A codec with a residual would
        leave some of the average in it, so changes go in 8 bits, residuals included; without such a codec, or with
        ``start_compression_step``, exactly.

        Raises:
            RuntimeError: on all ranks, if some rank's weights are not finite.
            ValueError: under ``detect_desync``, if some rank has made more steps.
        """
        if self._travel is not None:
            self._session.check_usable()
            self._check_own("finish()")
            with own_modes():
                self._finish(self._travel)

    def _finish(self, travel: Travel) -> None:
        travel.compare()
        travel.beside.look()
        for fragment in sorted(self._rounds.travelling(), key=lambda f: f.due or 0):
            travel.merge(fragment)
        for fragment in self._rounds.fragments:
            rejected = fragment.rejected
            travel.send([fragment], last=True)
            travel.merge(fragment)
            if fragment.rejected > rejected:
                raise RuntimeError("finish() has averaged nothing: some rank's weights are not finite")

    def _check_own(self, call: str) -> None:
        if self._lent:
            raise RuntimeError(f"{call} inside outer_weights() would miss this rank's own weights: call it outside")

    @property
    def period(self) -> int:
        """Optimizer steps between two exchanges of a parameter, at present; 1 with one rank."""
        rounds = self._rounds
        return 1 if self._travel is None else rounds.period or self.settings.period_at(0, self._lr, None)

    @property
    def pending(self) -> tuple[str, ...]:
        """Names of the parameters that were sent and are not merged yet."""
        return tuple(name for fragment in self._rounds.travelling() for name in fragment.parameters)

    @property
    def _lr(self) -> float:
        return float(self.services.optimizers[0].param_groups[0]["lr"])

    def stats(self) -> Stats:
        """Return counters since ``attach``; ``steps`` are the optimizer's."""
        travel, local = self._travel, self.settings
        if travel is None:
            return dataclasses.replace(
                self._session.stats("one rank only: nothing is sent"), method="local", steps=self._rounds.count
            )
        ledger = travel.ledger()
        rounds = sum(fragment.state.step for fragment in self._rounds.fragments)
        why = travel.times.said or ("" if isinstance(local.sync_every, int) else str(local.sync_every))
        delay = local.delay_in(self.period, self._rounds.measured)
        every = f"{self.period} steps" + (f" ({why})" if why else "") + (f", merged {delay} later" if delay else "")
        found = self._session.stats(f"{rounds} rounds, every {every}, by {self._session.method.name}")
        return dataclasses.replace(
            found,
            method="local",
            settled=not local.measures(self._rounds.measured),
            rejected_steps=sum(fragment.rejected for fragment in self._rounds.fragments),
            bytes_sent=found.bytes_sent + ledger.total,
            exposed_seconds=travel.seconds,
            collectives=dict(Counter(found.collectives) + Counter(ledger.issued)),
            bytes_by_kind=dict(Counter(found.bytes_by_kind) + Counter(ledger.bytes)),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state. Save it on every rank, with that rank's own model and optimizer.

        Waits for exchanges that are under way; not a collective.

        Raises:
            RuntimeError: inside ``outer_weights``, where the model does not hold this rank's own weights.
        """
        self._check_own("state_dict()")
        return local_persistence.to_state_dict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a ``state_dict`` of this rank: training continues bit for bit.

        On another number of ranks, give the union of all old ranks' dicts: what was under way is merged into the outer
        weights, from which all continue, and every rank gets the mean of the residuals. Call ``finish`` before saving
        to keep the steps made since the last round, too.

        Raises:
            ValueError: it was saved by another rank or under other settings, or does not fit the model; nothing has
                changed.
            RuntimeError: inside ``outer_weights``.
        """
        self._check_own("load_state_dict()")
        found = local_persistence.fitting(self, state)
        found.restore()
        found.adopt()

    def close(self) -> None:
        """Remove the hooks and give the process groups back. Idempotent. Waits for what is under way, and drops it.

        If called while an exception is handled, it does not wait.
        """
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        session, error = self._session, sys.exc_info()[1]
        travelling = self._rounds.travelling() if self._travel is not None and session.broken is None else []
        try:
            if error is not None:
                session.running = bool(travelling)
                session.leave(error)
            for fragment in travelling if error is None else ():
                assert self._travel is not None
                self._travel.receive(fragment)
        finally:
            if self._inner is not None:
                self._inner.close()
            self.services.close()
            session.close()
            forget(self.services.model, self)

    def __enter__(self) -> LocalSync:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class _Steps:
    """Counts optimizer steps: one, when every optimizer that ``attach`` was given has stepped.

    A step of another optimizer counts as theirs whose parameters it has: SAM's inner optimizer steps for SAM, which
    may never step. Within a step of theirs it does not count.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self.waiting: set[int] = set()  # those that have not stepped since the last count
        self._under_way: torch.optim.Optimizer | None = None
        self._in_vain = 0

    def begins(self, optimizer: torch.optim.Optimizer) -> bool:
        """Note that a step begins. Return whether it is not a part of another one's."""
        self._in_vain += 1
        if self._in_vain == _UNCOUNTED:
            logger.warning(
                "thinwire: optimizers have stepped %d times, and nothing was averaged: a step counts when "
                "every optimizer that attach was given has stepped", _UNCOUNTED,
            )  # fmt: skip
        if optimizer in self._optimizers or self._under_way is None:
            self._under_way = optimizer
        return self._under_way is optimizer

    def ends(self, optimizer: torch.optim.Optimizer) -> bool:
        """Note that a step has ended. Return whether it was not a part of another one's."""
        if self._under_way is not optimizer:
            return False
        self._under_way = None
        return True

    def counts(self, optimizer: torch.optim.Optimizer) -> bool:
        """Take a step into account. Return whether all have stepped now."""
        stepped = {id(optimizer)}
        if optimizer not in self._optimizers:
            its = {id(p) for group in optimizer.param_groups for p in group["params"]}
            stepped = {id(o) for o in self._optimizers if owned(o, its)}
        self.waiting = (self.waiting or {id(o) for o in self._optimizers}) - stepped
        if not self.waiting:
            self._in_vain = 0
        return not self.waiting


class Beside:
    """What travels with the last fragment: buffers, and frozen parameters that the script changes all the same.

    Such a parameter is a target that follows the trained weights, for example.

    Args:
        buffers: equal on all ranks, as are the others.
        frozen: parameters that no optimizer trains.
        services: of the handle.
    """

    def __init__(self, buffers: Sequence[Named], frozen: Sequence[Named], services: Services) -> None:
        self._buffers, self._frozen, self._services = buffers, frozen, services
        self._seen = [_sample(one.tensor) for one in frozen]
        self.names: set[str] = set()  # of the frozen ones that some rank's script was seen to change
        self._left: list[Named | Tensor] = []

    @property
    def dtypes(self) -> set[torch.dtype]:
        """The dtypes of all that may travel."""
        return {one.tensor.dtype for one in (*self._buffers, *self._frozen)}

    def look(self) -> None:
        """Find out which frozen parameters have changed on any rank. All ranks must call it."""
        if self._frozen:
            mine = bytes(not torch.equal(_sample(one.now()), seen) for one, seen in zip(self._frozen, self._seen))
            rows = self._services.gather(mine)
            self.names |= {one.name for k, one in enumerate(self._frozen) if any(row[k] for row in rows)}

    def leave(self, moments: Sequence[Tensor]) -> None:
        """Let what is known by now travel, and these moments."""
        self._left = [*self._buffers, *(one for one in self._frozen if one.name in self.names), *moments]

    def left(self) -> list[Tensor]:
        """Return what travels, or what the script has put in its place since."""
        return [one if isinstance(one, Tensor) else one.now() for one in self._left]

    def follow(self, names: Sequence[str]) -> bool:
        """Let the parameters of these names travel, too. Return whether all are here."""
        here = {one.name for one in self._frozen}
        self.names |= here.intersection(names)
        return here.issuperset(names)


def _sample(x: Tensor) -> Tensor:
    """Return a thousand elements of a tensor; who averages or replaces a parameter changes nearly all."""
    flat = x.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // 1000)].clone()


class Travel:
    """Sends, receives and merges fragments. Fragments sent together share a channel.

    There are as many channels as rounds can be under way at once; they are used in turn.

    Args:
        services: of the handle.
        rounds: of this rank.
        beside: sent with the last fragment.
        moments: likewise, when they are due.
        detect_desync: whether ranks compare how many steps they have made, before they send.

    Attributes:
        seconds: how long training has waited for fragments.
        times: of steps and rounds.
        layers: of exchanges, by fragment.
        beside: as above.
    """

    def __init__(
        self,
        services: Services,
        rounds: Rounds,
        beside: Beside,
        moments: Moments,
        detect_desync: bool,
    ) -> None:
        self._rounds, self.beside, self._moments = rounds, beside, moments
        self._agree_on = services.agree_on if detect_desync else None
        self._averages = Averages()
        depth = depths(exchanges for fragment in rounds.fragments for exchanges in fragment.traced())
        depth |= Counter({Scope.WORLD: len(beside.dtypes | moments.dtypes)})
        wanted = deepest_of_all(depth, services.gather)
        self._channels = [services.channel(f"local {k}", wanted) for k in range(rounds.most_travelling())]
        self._next = 0
        self._under_way: dict[int, int] = {}
        self._in_vain = Counter[int]()
        elements = sum(x.numel() for fragment in rounds.fragments for x in fragment.parameters.values())
        comm = services.session.comm
        self.times = RoundTimes(services, elements, beside=comm is None or comm.side_stream())
        self.seconds, self.layers = 0.0, CalendarTimes(services)

    def compare(self) -> None:
        """Raise ``ValueError`` on all ranks unless all have made as many steps; only under ``detect_desync``."""
        if self._agree_on is not None:
            self._agree_on({"optimizer steps": self._rounds.count, "period": self._rounds.period})

    def leave(self, fragments: Sequence[Fragment]) -> None:
        """Send the fragments that are due; to measure a calendar, one after the other, waiting for each."""
        if fragments:
            self.compare()
        if not (self._rounds.calendar and self._rounds.waited):
            self.send(fragments)
            return
        for fragment in fragments:
            began = time.perf_counter()
            self.send([fragment])
            self.merge(fragment)
            if not fragment.starting:  # before the codec begins, an exchange does not show its time
                self.layers.exchanged(fragment.index, time.perf_counter() - began)

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
            if not end.state.step:
                self.beside.look()
            self.beside.leave([] if last else self._moments.due(end.state.step + 1))
        if end in fragments and (beside := self.beside.left()):
            programs.append(self._averages.send(beside))
            names.append(["buffers and moments"])
        channel = self._channels[number]
        channel.begin(names, programs.__getitem__)
        for index in range(len(programs)):
            channel.ready(index, inline=False)

    def receive(self, fragment: Fragment) -> None:
        """Wait for a fragment, if it has not arrived."""
        if not fragment.received:
            self.seconds += self._channels[self._under_way.pop(fragment.index)].wait()
            self._in_vain[fragment.index] = 0 if fragment.receive() else self._in_vain[fragment.index] + 1
            if self._in_vain[fragment.index] == _IN_VAIN:
                logger.warning(
                    "thinwire: nothing was averaged in the last %d rounds: %s weights were not finite in each. An "
                    "optimizer state that is not finite stays so: restart from a checkpoint",
                    _IN_VAIN, "another rank's" if fragment.sent_finite else "this rank's",
                )  # fmt: skip

    def merge(self, fragment: Fragment) -> None:
        """Wait for a fragment, and merge it into the weights."""
        self.receive(fragment)
        self._rounds.merge(fragment)
        if fragment is self._rounds.fragments[-1]:
            self._averages.merge(self.beside.left())

    def snapshot(self) -> list[Tensor]:
        """Wait for all that is under way. Return the buffers that came with it."""
        for fragment in self._rounds.travelling():
            self.receive(fragment)
        return self._averages.snapshot()

    def restore(self, buffers: Sequence[Tensor], frozen: Sequence[str], *, merged: bool) -> None:
        """Take over buffers from a snapshot; ``merged``: put them into the model at once. Forgets measured times.

        Args:
            buffers: the snapshot.
            frozen: names of the frozen parameters that were sent with them.
        """
        self.times, self.layers = self.times.anew(), self.layers.anew()
        here = self.beside.follow(frozen)
        self.beside.leave([])
        self._averages.restore(buffers if here else [], self.beside.left())
        if merged:
            self._averages.merge(self.beside.left())

    def ledger(self) -> Ledger:
        """Return the ledger of what was sent on all channels."""
        total = Ledger()
        for channel in self._channels:
            total.add(channel.ledger)
        return total
