"""LocalSync: what ``attach`` returns for local steps. Optimizer steps trigger rounds; gradients are left alone."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.core.checks import check_count
from thinwire.core.program import Method, State, Topology
from thinwire.core.program.bucket import local_shard
from thinwire.core.program.ops import own_modes
from thinwire.engine.backward_hooks import AttachSettings, LateParameters
from thinwire.engine.local.memory import ADAM, MemoryRow, held
from thinwire.engine.local.pace import Pace
from thinwire.engine.local.rounds import Fragment, Rounds
from thinwire.engine.local.settings import QSR, Local
from thinwire.engine.local.site import Site
from thinwire.engine.local.times import RoundTimes
from thinwire.engine.local.travel import BuffersAndFrozen, Moments, RoundRunner, open_channels
from thinwire.engine.look import BeforeForward
from thinwire.engine.parameters import ManagedParameter, buffers_of, frozen_of, model_facts, sent_at_start
from thinwire.engine.ranks.communicator import Communicator
from thinwire.engine.services import CheckedState, Handle, Services, fitting
from thinwire.engine.session import Session, owned
from thinwire.engine.state.persistence import LOCAL, check_version, from_flat, frozen_since, on_device, to_flat, without
from thinwire.engine.state.scaler import SkippedSteps
from thinwire.engine.stats import Stats
from thinwire.engine.sync import GradientSync

logger = logging.getLogger("thinwire")
_apart: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # that have made local steps, on several ranks
_UNCOUNTED = 100  # consecutive optimizer steps that did not count, after which to warn: a critic makes fewer


def tell_apart(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Warn if equal gradients would not keep weights equal, because local steps have left different states."""
    if any(optimizer in _apart and optimizer.state for optimizer in optimizers):
        logger.warning(
            "thinwire: the optimizer has made local steps, so its state differs between ranks, and with it their "
            "weights will: make a new optimizer before you attach another method"
        )


class LocalSync(Handle):
    """Averages the weights of several ranks' models every few steps. Made by :func:`thinwire.attach`.

    Attributes:
        services: what other packages use of it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        local: Local,
        managed: list[ManagedParameter],
        comm: Communicator,
        topology: Topology,
        settings: AttachSettings,
        inner: GradientSync | None = None,
        site: Site | None = None,
    ) -> None:
        state, self._settings, self._inner = State(comm.rank, topology), local, inner
        self._session = session = Session(local.method, comm, state, None, {}, start=0)
        self._parameters = {id(m.parameter): m for m in managed}
        self._nbytes = sum(local_shard(m.parameter).nbytes for m in managed)
        self._late = LateParameters(
            model,
            "Call finish() and close(), and attach again, after such a change (in a framework: end the training, and "
            "begin another)",
        )
        self._steps, self._lent, self._compares = _Steps(optimizers), False, settings.detect_desync
        self.services = Services(model, optimizers, managed[0].device, session, apart=True)
        self.services.own_buffers = not settings.broadcast_buffers
        self.services.site = site
        weights, dense = {m.name: m.parameter for m in managed}, [m.name for m in managed if m.dense]
        several, start = len(comm.ranks) > 1, settings.start_compression_step
        if several:
            options = {"start_compression_step": start, "local steps": repr(local)}
            shared = {"topology": list(topology.layout), "broadcast_buffers": settings.broadcast_buffers}
            shared["detect_desync"] = settings.detect_desync
            shared["average_buffers"] = list(local.average_buffers)
            comm.agree(options | shared | model_facts(model, managed, optimizers))
            comm.broadcast(sent_at_start(model))
        rank, workers, first = state.rank, topology, None
        if inner is not None:
            first = topology.local_rank(rank) == 0
            rank, workers = topology.node_of(rank), Topology(topology.nodes)
        if isinstance(local.codec, Method):
            local = dataclasses.replace(local, codec=comm.fit(local.codec))
        self._rounds = Rounds(local, weights, dense, rank, workers, first=first, start=start,
                              agree=None if site is None else site.agree,
                              pace=self._pace(own=True) if local.own_pace and several else None)  # fmt: skip
        self._travel: RoundRunner | None = None  # None: there is one rank
        if several:
            buffers = buffers_of(model) if settings.broadcast_buffers else []
            beside = BuffersAndFrozen(buffers, frozen_of(model, weights), self.services.gather,
                            averaged=local.average_buffers)  # fmt: skip
            moments = Moments(dict(local.moments), optimizers, weights.values())
            before = self._compare if self._compares else lambda: None
            services = self.services
            try:
                channels = open_channels(services, self._rounds, beside, moments)
                self._travel = RoundRunner(self._rounds, channels, beside, moments, before)
                self._measure_anew()
            except Exception as error:  # a rank was lost meanwhile: the channels made so far have threads
                session.give_up(str(error))
                services.close()
                raise
        session.watch.listen(self._watch, self._stepped)
        self._handles: list[Any] = [SkippedSteps(self._skipped)]
        self._forward = BeforeForward(model, self._look) if local.look else None
        self.services.remember(self)

    def _pace(self, *, own: bool) -> Pace:
        topology, site = self.services.topology, self.services.site
        shared = {} if site is None else {"least": site.least}
        together = self._inner is not None
        return Pace(self.services.rank, topology, self.services.device, together=together, own=own, **shared)

    def _look(self) -> None:
        self._rounds.look()
        self._changed()

    def _changed(self) -> None:
        if self.services.site is not None:
            self.services.site.changed()

    def _compare(self) -> None:
        self.services.agree_on({"optimizer steps": self._rounds.count, "period": self._rounds.period})

    def _measure_anew(self) -> None:
        elements = sum(m.parameter.numel() for m in self._parameters.values())
        beside, site = self._session.comm.side_stream(), self.services.site
        if site is not None:
            beside = bool(site.agree(torch.tensor(beside)))
        self._times = RoundTimes(self.services, elements, beside=beside)

    # --- hooks ---------------------------------------------------------------------------------------------------

    def _watch(self, optimizer: torch.optim.Optimizer) -> None:
        if not owned(optimizer, self._parameters):
            return
        whole = self._steps.begins(optimizer, several=self._travel is not None)
        if whole and self._lent:
            raise RuntimeError(
                "optimizer.step() inside outer_weights() would train weights that are only lent: call it outside"
            )
        if not whole or self._travel is None:
            return
        self._session.check_usable()
        self._late.check(optimizer, self._parameters)
        self._tell_loaded()

    def _tell_loaded(self) -> None:
        """Warn at the first step if weights were changed after ``attach``, for example loaded from a file."""
        known = self._rounds.count or self._steps.waiting or self._travel is None or self._settings.averages
        if not known and self._rounds.drifted:
            logger.warning(
                "thinwire: weights were changed after attach, before the first step: that change is averaged as if the "
                "model had learnt it, through the codec and the outer optimizer. Load weights before attach, or a "
                "complete checkpoint with thinwire.checkpoint.load"
            )

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if self._steps.ends(optimizer) and self._count(optimizer) and self._forward is not None:
            self._forward.due = True  # not after a skipped step, whose weights are still ahead

    def _skipped(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step that a GradScaler skipped: the other ranks count it too."""
        if owned(optimizer, self._parameters):
            self._tell_loaded()
            self._count(optimizer)

    def _count(self, optimizer: torch.optim.Optimizer) -> bool:
        counts = self._steps.counts(optimizer)
        if counts:
            with own_modes():
                self._counted()
        return counts

    def _counted(self) -> None:
        rounds, travel, session = self._rounds, self._travel, self._session
        if travel is None:
            rounds.stepped(self._lr)
            rounds.alone()
            session.state.step = rounds.count
            return
        if measuring := rounds.measuring:
            self._times.stepped()
        if (pace := rounds.pace) is not None:
            if pace.own and rounds.total is None:
                raise RuntimeError(
                    'pace="own": take the steps of the loop from `for step in sync.steps(total)`, so that ranks of '
                    "different speed end together"
                )
            if not rounds.joined:
                pace.stepped()
        session.state.step = rounds.count + 1
        session.averaged(self._nbytes)
        for _ in travel.turn(self._lr):
            pass  # ``merge`` waits
        session.state.step = rounds.count
        if pace is not None:
            pace.left()
        if not measuring:
            return
        self._times.exchanged()
        if rounds.ends:
            starting = any(fragment.starting for fragment in rounds.fragments)
            rounds.measured, rounds.code = self._times.period(self._settings, starting=starting)

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

    def steps(self, total: int) -> Iterator[int]:
        """Count steps to ``total``, from 0 or where a loaded checkpoint was: ``for step in sync.steps(1000)``.

        All ranks must call it. With ``pace="own"`` a rank of half the speed sees 0, 2, 4 ... Each turn of the loop
        makes an optimizer step: accumulate in an inner loop.

        Raises:
            ValueError: ranks have different totals.
            RuntimeError: turns of the loop make no optimizer step.
        """
        check_count("steps: total", total, least=1)
        if self._travel is not None:
            self.services.agree_on({"steps: total": total}, "agreeing on steps()")
        self._rounds.total = total
        return self._counting(total)

    def _counting(self, total: int) -> Iterator[int]:
        made, turns = -1, 0
        while (step := self._number) < total:
            made, turns = step, turns + 1 if step == made else 0
            if turns == _UNCOUNTED:
                raise RuntimeError(
                    f"{turns} turns of the loop over steps() have made no optimizer step: accumulate in an inner loop, "
                    "and leave the loop when you close the handle"
                )
            yield step

    @contextmanager
    def join(self, divide_by_initial_world_size: bool = False) -> Iterator[None]:
        """Let ranks have different numbers of batches: wrap the loop, on all ranks, and call ``finish`` after it.

        A rank whose loop is over takes part in the others' rounds with empty steps until all are done. Averages are
        over the ranks that have made steps since the last round.

        Args:
            divide_by_initial_world_size: averages count ranks without steps, too, as those of torch's ``Join``.

        Raises:
            ValueError: ranks of a machine average gradients (``inside=``), or the period follows the learning rate.
        """
        rounds = self._rounds
        if self._travel is None:
            yield
            return
        if self._inner is not None or isinstance(self._settings.sync_every, QSR):
            why = "gradients inside machines" if self._inner is not None else "a period that follows the learning rate"
            raise ValueError(f"join() has no part for {why}: give all ranks as many batches")
        before = rounds.pace
        rounds.pace = pace = before or self._pace(own=False)
        pace.initial, pace.training = divide_by_initial_world_size, self.services.topology.world_size
        try:
            yield
            rounds.joined = True
            while pace.training:
                self._counted()
            for fragment in rounds.travelling():
                self._travel.merge(fragment)
        finally:
            rounds.joined, rounds.pace = False, before

    @property
    def _number(self) -> int:
        return self._rounds.count

    @property
    def progress(self) -> float:
        """Share of the steps of :meth:`steps` that are made, for learning-rate schedules; 0 before it is called."""
        return min(1.0, self._number / self._rounds.total) if self._rounds.total else 0.0

    @property
    def in_step(self) -> bool:
        """Whether all ranks are at this step; at their own pace, between two periods, and at the end of ``steps``."""
        rounds = self._rounds
        return rounds.pace is None or not rounds.pace.own or rounds.ends or rounds.count == rounds.total

    @contextmanager
    def outer_weights(self) -> Iterator[None]:
        """Put the outer weights, which are equal on all ranks, into the model temporarily: to evaluate or to save.

        Afterwards the model has this rank's own weights again, and training continues from these. Not a collective: one
        rank may do it alone.
        """
        self._check_whole()
        lent, self._lent = self._lent, True
        if self._forward is not None:
            due, self._forward.due = self._forward.due, False
        try:
            # Before the first step the outer weights are the model's, even if they were loaded after attach.
            begun = self._travel is not None and self._rounds.count
            with self._rounds.outer_weights() if begun else contextlib.nullcontext():
                self._changed()
                yield
        finally:
            self._changed()
            self._lent = lent
            if self._forward is not None:
                self._forward.due = due

    def finish(self) -> None:
        """Merge what is under way, and average once more: then all ranks have the same weights.

        All ranks must call it, after the last step. The outer optimizer is not used. A codec with a residual would
        leave some of the average in it, so changes go in 8 bits, residuals included; without such a codec, or with
        ``start_compression_step``, exactly.

        Raises:
            RuntimeError: on all ranks, if some rank's weights are not finite.
            ValueError: some rank has made more rounds, or under ``detect_desync`` more steps.
        """
        if self._travel is not None:
            self._session.check_usable()
            self._check_own("finish()")
            self._check_whole()
            with own_modes():
                if not self._compares:  # else it does so itself: its messages must not meet a round's in other bits
                    self._check_together()
                for _ in self._travel.finish():
                    pass
            self._changed()

    def _check_own(self, call: str) -> None:
        if self._lent:
            raise RuntimeError(f"{call} inside outer_weights() would miss this rank's own weights: call it outside")

    def _check_together(self) -> None:
        mine = b"%d %d" % (self._rounds.sent, self._rounds.count)
        rows = [row.split() for row in self.services.gather(mine, "finish()")]
        if other := next((rank for rank, row in enumerate(rows) if row[0] != rows[0][0]), 0):
            raise ValueError(
                f"rank 0 has made {int(rows[0][1])} steps and rank {other} {int(rows[other][1])}, so a round of one "
                "waits for the other: give all ranks as many batches (DistributedSampler, drop_last=True), or "
                "wrap the loop in `with sync.join():`"
            )

    def _check_whole(self) -> None:
        for optimizer in self.services.optimizers:
            if callable(getattr(optimizer, "eval", None)) and any(g.get("train_mode") for g in optimizer.param_groups):
                raise RuntimeError(
                    f"{type(optimizer).__name__} is in training mode, where a part of the weights is in its state, "
                    "which is each rank's own: call optimizer.eval() before finish() and outer_weights()"
                )

    @property
    def period(self) -> int:
        """Optimizer steps between two exchanges of a parameter, at present; 1 with one rank."""
        rounds = self._rounds
        return 1 if self._travel is None else rounds.period or self._settings.period_at(0, self._lr, None)

    @property
    def pending(self) -> tuple[str, ...]:
        """Names of the parameters that were sent and are not merged yet."""
        return tuple(name for fragment in self._rounds.travelling() for name in fragment.parameters)

    @property
    def _lr(self) -> float:
        return self._rounds.rate(self.services.optimizers[0])

    def memory(self) -> list[MemoryRow]:
        """Return the bytes that training holds on this rank, by kind; see :func:`thinwire.engine.local.memory.held`.

        Before an optimizer's first step, its state is taken for Adam's.
        """
        weights = [local_shard(m.parameter) for m in self._parameters.values()]
        states = [state for optimizer in self.services.optimizers for state in optimizer.state.values()]
        kept = [local_shard(x) for state in states for x in state.values() if isinstance(x, Tensor)]
        own = sum(x.nbytes for x in kept) if states else ADAM * self._nbytes
        return held(self._rounds, weights, own)

    def stats(self) -> Stats:
        """Return counters since ``attach``; ``steps`` are the optimizer's."""
        travel, local = self._travel, self._settings
        if travel is None:
            return dataclasses.replace(
                self._session.stats("one rank only: nothing is sent"), method="local", steps=self._rounds.count
            )
        ledger = travel.ledger()
        rounds = sum(fragment.state.step for fragment in self._rounds.fragments)
        said, why = self._times.said, "" if isinstance(local.sync_every, (int, str)) else f" ({local.sync_every})"
        delay = local.delay_in(self.period, self._rounds.measured)
        every = f"{self.period} steps{why}" + (f", merged {delay} later" if delay else "")
        note = f"{rounds} rounds, every {every}, by {self._session.method.name}" + (f"; {said}" if said else "")
        if (pace := self._rounds.pace) is not None and pace.own and self._rounds.period:
            note += f"; own pace: {pace.quota} of {self.period} steps here"
        workers = local.workers(self.services.topology)
        if local.outer is None and workers > 1:
            root = math.sqrt(workers)  # each worker's normalised step is smaller by about that
            note += f"; local steps want about {root:.1f} times the learning rate that is best for DDP"
        found = self._session.stats(note)
        return dataclasses.replace(
            found,
            method="local",
            settled=not self._rounds.measuring,
            rejected_steps=sum(fragment.rejected for fragment in self._rounds.fragments),
            bytes_sent=found.bytes_sent + ledger.total,
            exposed_seconds=travel.seconds,
            collectives=dict(Counter(found.collectives) + Counter(ledger.issued)),
            bytes_by_kind=dict(Counter(found.bytes_by_kind) + Counter(ledger.bytes)),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state. Save it on every rank, with that rank's own model and optimizer.

        Waits for exchanges that are under way; not a collective. The codec's state is under the keys of
        :mod:`~thinwire.engine.state.persistence`. Besides, there are ``outer``, equal on all ranks: outer weights and
        momenta, counters, means that have arrived; ``sent/<rank>``: the weights of what is under way; and
        ``inside/<rank>``: the state of the method that averages gradients inside machines, if there is one.

        Raises:
            RuntimeError: inside ``outer_weights``, where the model does not hold this rank's own weights; or at its own
                pace, where not ``in_step``.
        """
        self._check_own("state_dict()")
        if not self.in_step:
            raise RuntimeError('pace="own": ranks are at different steps here: save where sync.in_step is true')
        buffers, frozen = self._held()
        outer, rank, sent = self._rounds.snapshot(), self.services.rank, []
        codec: dict[str, Any] = {"step": outer["count"], "dropped": 0, "residual": {}, "offset": {}}
        codec |= {"shared": {}, "local": {}}
        for fragment, saved in zip(self._rounds.fragments, outer["fragments"]):
            part = saved.pop("codec")
            for kind in ("residual", "offset"):
                codec[kind] |= part[kind]
            for kind in ("shared", "local"):
                for field, named in part[kind].items():
                    codec[kind].setdefault(field, {}).update(named)
            saved |= {"names": list(fragment.parameters), "rounds": part["step"], "dropped": part["dropped"]}
            sent.append(saved.pop("sent"))
        pace = {f"pace/{rank}": outer.pop("pace")} if "pace" in outer else {}
        flat = pace | to_flat(self._session, {}, None, codec) | {LOCAL: self._settings.told, f"sent/{rank}": sent}
        if self._inner is not None:
            flat[f"inside/{rank}"] = self._inner.state_dict()
        return flat | {"outer": {**outer, "buffers": buffers, "frozen": frozen}}

    def _held(self) -> tuple[list[Tensor], list[str]]:
        """Wait for what is under way. Return the buffers that came with it, and the names of frozen parameters."""
        travel = self._travel
        return ([], []) if travel is None else (travel.snapshot(), sorted(travel.beside.names))

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
        super().load_state_dict(state)

    def _fitting(self, state: Mapping[str, Any]) -> CheckedState:
        services, rounds = self.services, self._rounds
        rank, same = services.rank, self._check_fits(state)
        frozen = frozen_since(services.model, {name for fragment in rounds.fragments for name in fragment.parameters})
        state, outer = without(state, frozen), dict(state["outer"])
        if len(outer["fragments"]) != len(rounds.fragments):
            raise ValueError("the state was saved from a model with other parameters")
        sent = state[f"sent/{rank}"] if same else [[]] * len(rounds.fragments)
        parts = [
            _of_trained({**saved, "sent": own}, frozen) for saved, own in zip(outer["fragments"], sent, strict=True)
        ]
        for fragment, saved in zip(rounds.fragments, parts):
            _check_shapes(fragment, saved)
        shapes = {name: tuple(local_shard(x).shape) for f in rounds.fragments for name, x in f.parameters.items()}
        codec = on_device(from_flat(services.session, state, shapes), services.device)
        fragments = [
            {**saved, "codec": _part(codec, fragment, saved)} for fragment, saved in zip(rounds.fragments, parts)
        ]
        inside = None if self._inner is None else fitting(self._inner, state[f"inside/{rank}"])
        snapshot = {**outer, "fragments": fragments, "pace": state.get(f"pace/{rank}") if same else None}
        return CheckedState(
            partial(self._restore, snapshot, outer["buffers"], inside, again=not same),
            lambda: None if inside is None else inside.adopt(),
        )

    def _restore(
        self, snapshot: dict[str, Any], buffers: list[Tensor], inside: CheckedState | None, *, again: bool
    ) -> Callable[[], None]:
        """Take a state over; ``again``: begin again from its outer weights. Return what undoes it."""
        held, before = self._held(), self._rounds.snapshot()
        undo_inside = None if inside is None else inside.restore()
        self._put(snapshot, buffers, snapshot["frozen"], again=again)

        def undo() -> None:
            self._put(before, *held, again=False)
            if undo_inside is not None:
                undo_inside()

        return undo

    def _check_fits(self, state: Mapping[str, Any]) -> bool:
        """Return whether a state is of this number of ranks. Raise ``ValueError`` if it is of something else."""
        check_version(state)
        if LOCAL not in state:
            raise ValueError(
                f"the state was saved by {state.get('method')!r}, which exchanges gradients, but here steps are local: "
                "attach with that method, or start from the saved weights"
            )
        rank, same = self.services.rank, int(state["world_size"]) == self.services.topology.world_size
        if state[LOCAL] != self._settings.told:
            raise ValueError(
                f"the state was saved with {state[LOCAL]}, but here it is {self._settings.told}; to change settings, "
                "call finish() before saving, and start from the saved weights"
            )
        if same and state["rank"] != rank:
            raise ValueError(
                f"the state belongs to rank {state['rank']}, but this is rank {rank}: under local steps each rank has "
                "its own, with a model and an optimizer, which thinwire.checkpoint.save keeps and "
                "torch.distributed.checkpoint does not"
            )
        if not same and self._settings.inside is not None:
            raise ValueError(
                f"the state was saved on {state['world_size']} ranks, but with inside= the residuals belong to "
                "machines: call finish() before saving, and start from the saved weights"
            )
        return same

    def _put(self, snapshot: Mapping[str, Any], buffers: list[Tensor], frozen: list[str], *, again: bool) -> None:
        self._rounds.restore(snapshot)
        if again:
            self._rounds.begin_again()
        if self._travel is not None:
            self._travel.restore(buffers, frozen, merged=again)
            self._measure_anew()
        self.services.state.step = self._rounds.count
        self._changed()
        if self._forward is not None:
            self._forward.due = True

    def close(self) -> None:
        """Remove the hooks and give the process groups back. Idempotent. Waits for what is under way, and drops it.

        If called while an exception is handled, it does not wait. Warns if steps were never averaged.
        """
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._forward is not None:
            self._forward.close()
        if self._travel is not None and self._inner is None and self._rounds.count:
            _apart.update(self.services.optimizers)
        session, travel, error = self._session, self._travel, sys.exc_info()[1]
        if travel is not None and error is None and session.broken is None and not self._lent and self._rounds.open:
            logger.warning(
                "thinwire: closed with steps that were not averaged, so each rank keeps weights of its own: call "
                "finish() on all ranks before close(), or save inside outer_weights()"
            )
        travelling = self._rounds.travelling() if travel is not None and session.broken is None else []
        try:
            if error is not None:
                session.running = bool(travelling)
                session.leave(error)
            elif travel is not None:
                for fragment in travelling:
                    travel.receive(fragment)
        finally:
            if self._inner is not None:
                self._inner.close()
            self.services.close()
            session.close()


class _Steps:
    """Counts optimizer steps: one when all have stepped, or for them others with their parameters (SAM's inner one)."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self.waiting: set[int] = set()  # those that have not stepped since the last count
        self._under_way: torch.optim.Optimizer | None = None
        self._in_vain = 0

    def begins(self, optimizer: torch.optim.Optimizer, *, several: bool) -> bool:
        """Note that a step begins. Return whether it is not a part of another one's. ``several``: ranks, not one."""
        self._in_vain += several
        if several and self._in_vain == _UNCOUNTED:
            logger.warning(
                "thinwire: optimizers have stepped %d times, and nothing was averaged: a step counts when "
                "every optimizer that attach was given has stepped", _UNCOUNTED,
            )  # fmt: skip
        if optimizer in self._optimizers or self._under_way is None:
            self._under_way = optimizer
        return self._under_way is optimizer

    def ends(self, optimizer: torch.optim.Optimizer) -> bool:
        if self._under_way is not optimizer:
            return False
        self._under_way = None
        return True

    def counts(self, optimizer: torch.optim.Optimizer) -> bool:
        stepped = {id(optimizer)}
        if optimizer not in self._optimizers:
            its = {id(p) for group in optimizer.param_groups for p in group["params"]}
            stepped = {id(o) for o in self._optimizers if owned(o, its)}
        self.waiting = (self.waiting or {id(o) for o in self._optimizers}) - stepped
        if not self.waiting:
            self._in_vain = 0
        return not self.waiting


def _of_trained(saved: Mapping[str, Any], frozen: Container[str]) -> dict[str, Any]:
    """Return a saved fragment without parameters that are frozen now; all its lists go by parameter."""
    here = [place for place, name in enumerate(saved["names"]) if name not in frozen]
    return {k: [value[i] for i in here] if isinstance(value, list) and value else value for k, value in saved.items()}


def _check_shapes(fragment: Fragment, saved: Mapping[str, Any]) -> None:
    ours = {name: list(local_shard(x).shape) for name, x in fragment.parameters.items()}
    there = {name: list(x.shape) for name, x in zip(saved["names"], saved["anchors"], strict=True)}
    for name in [*ours, *there]:
        if ours.get(name) != there.get(name):
            raise ValueError(
                f"the state holds outer weights of {name} of shape {there.get(name)}, but the model's parameter has "
                f"{ours.get(name)}"
            )


def _part(codec: Mapping[str, Any], fragment: Fragment, saved: Mapping[str, Any]) -> dict[str, Any]:
    names = fragment.parameters
    part: dict[str, Any] = {"step": saved["rounds"], "dropped": saved["dropped"]}
    for kind in ("residual", "offset"):
        part[kind] = {name: x for name, x in codec[kind].items() if name in names}
    for kind in ("shared", "local"):
        fields = {field: {n: x for n, x in named.items() if n in names} for field, named in codec[kind].items()}
        part[kind] = {field: named for field, named in fields.items() if named}
    return part


def chosen(sync: LocalSync) -> dict[str, Any]:
    """Return what "auto" has found, as options that ``attach`` takes in its place; empty without it, or until then."""
    rounds, codecs = sync._rounds, sync._settings.codecs
    if rounds.measured is None:
        return {}
    found = dict(zip(("sync_every", "fragment_sync_delay"), rounds.measured))
    codec = str(codecs[rounds.code].options().get("dtype")).removeprefix("torch.")
    return found | ({"codec": codec} if len(codecs) > 1 else {})
