"""Training that continues when a replica dies: torchft decides on the members, thinwire exchanges.

torchft's lighthouse forms quorums, its Manager heals joining replicas from one that is ahead, and its ``should_commit``
decides whether a step counts. Here, each quorum has its own communicator. A method's state is passed from one quorum to
the next, as it was after the last step that counted.

With local steps there is a quorum and a vote for each round. A failed round is repeated at once by the remaining
replicas, with the weights that they have: a replica that leaves only loses its own change. A joining replica receives
the weights, the outer weights and the optimizer state that another replica has at the end of its round, and takes part
in the exchange as a copy of it.

A replica may be a site, over whose ranks FSDP2 has sharded the model. Each rank then exchanges its shards with the
ranks that hold the same ones at other sites, in an exchange of their own; a round counts if all of a site's ranks have
received everything.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from thinwire.adapters.fsdp2_sites import shards_of
from thinwire.adapters.torchft_member import Quorum, QuorumHandle, QuorumMember, Quorums, added
from thinwire.core.methods.registry import resolve
from thinwire.core.program import Method, State, Topology
from thinwire.engine import attach as engine
from thinwire.engine.local.rounds import Fragment, Rounds
from thinwire.engine.local.settings import Local, named_local
from thinwire.engine.local.site import Site
from thinwire.engine.local.travel import BuffersAndFrozen, Moments, RoundRunner, open_channels
from thinwire.engine.parameters import (
    DenseRule,
    ManagedParameter,
    buffers_of,
    check_optimizers,
    managed_parameters,
    model_facts,
)
from thinwire.engine.ranks.communicator import Communicator, SingleRank
from thinwire.engine.services import Services
from thinwire.engine.session import Session
from thinwire.engine.stats import Stats
from thinwire.engine.sync import GradientSync


@dataclass(frozen=True)
class RoundOptions:
    keep_dense: DenseRule = "auto"
    start_compression_step: int | None = None
    broadcast_buffers: bool = True


def attach(
    model: nn.Module,
    optimizer: Any,
    method: Method | Local | str = "ssgd",
    *,
    manager: Any,
    **options: Any,
) -> QuorumSync | QuorumRounds:
    """Average over the replicas of torchft's quorum, instead of its ``DistributedDataParallel`` or ``LocalSGD``.

    The loop stays torchft's: ``zero_grad`` of its optimizer starts the quorum, ``step`` asks ``should_commit``. With
    local steps, your own optimizer steps, and each round starts a quorum and asks ``should_commit``. All replicas call
    this before their first quorum. Model, optimizer and the method's shared state are registered with the manager, so
    that joining replicas receive them.

    Args:
        model: on the CPU, not wrapped; for local steps it may be sharded over the replica group by FSDP2.
        optimizer: torchft's around yours, or your own; or a list.
        method: a name with its options, or an instance; not decoupled, and not "auto". "local" and "diloco" need a
            fixed number of steps: ``sync_every=64``.
        manager: a ``torchft.Manager(use_async_quorum=False)``, whose ``timeout`` also applies to exchanges.
        options: options of the method and of :func:`thinwire.attach`.

    Raises:
        ValueError: invalid options, or a manager that is not supported; the message says what to write.
    """
    if isinstance(method, str) and method.lower() == "auto":
        raise ValueError('"auto" measures a fixed set of ranks: name a method')
    for name in ("process_group", "topology", "timeout", "on_failure"):
        if name in options:
            raise ValueError(f"{name}= is handled by the manager here: leave it out")
    engine.check_model(model)
    if any(p.device.type != "cpu" for p in model.parameters()):
        raise ValueError("under torchft thinwire so far exchanges only from CPUs: move the model there")
    sharded = any(isinstance(p, DTensor) for p in model.parameters())
    listed = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    inner = [getattr(o, "optim", o) for o in listed]
    of_rounds = {f.name: options[f.name] for f in fields(RoundOptions) if f.name in options}
    local = named_local(method, {name: x for name, x in options.items() if name not in of_rounds})
    if local is not None:
        if any(one is not o for one, o in zip(inner, listed)):
            raise ValueError("local steps ask should_commit once a round: pass your own optimizer, not torchft's")
        check_settings(local)
        kept = RoundOptions(**of_rounds)
        if sharded:
            managed, site = shards_of(model, inner, local, kept.keep_dense)
        else:
            managed = managed_parameters(model, local.method, kept.keep_dense)
            check_optimizers(managed, inner)
            site = Site((), managed[0].device, lambda: None)
        member = QuorumMember(model, inner, Quorums(manager, site.size if sharded else None), site.place)
        return QuorumRounds(member, local, kept, managed, site)
    assert not isinstance(method, Local)  # handled by named_local
    if sharded:
        raise ValueError(
            "under torchft the gradients of a sharded model are not exchanged: average its weights between sites, by "
            '"local" or "diloco" with a number of steps, such as sync_every=64'
        )
    names = set(options) - set(inspect.signature(engine.attach).parameters)
    chosen = resolve(method, **{name: options.pop(name) for name in names})
    if chosen.decoupled:
        raise ValueError("a decoupled method updates weights after should_commit was called: leave out decoupled=True")
    return QuorumSync(QuorumMember(model, inner, Quorums(manager)), chosen, options)


class QuorumSync(QuorumHandle):
    """One replica's exchange of gradients, across all quorums. Made by :func:`attach`."""

    def __init__(self, member: QuorumMember, method: Method, options: Mapping[str, Any]) -> None:
        self._method, self._options = method, dict(options)
        member.memory.plan = self._options.pop("plan", None)
        self._sync: GradientSync | None = None
        self._past = Stats("", "", 0)
        super().__init__(member)

    def _enter(self, module: nn.Module, args: Any) -> None:
        """At the start of a forward: if the quorum has changed since the last one, connect to its members."""
        member, quorum = self._member, self._member.quorums.latest
        if quorum is None:
            return
        member.begins(quorum)
        if quorum is not member.met:
            self._leave()
            try:
                member.meet(quorum)
                self._sync = self._attached(quorum)
            except RuntimeError as error:
                self._failed(error)

    def _attached(self, quorum: Quorum) -> GradientSync:
        member = self._member
        assert member.circle is not None
        sync = engine.attach(
            member.model, member.optimizers, self._method, plan=member.memory.plan, timeout=member.quorums.timeout,
            process_group=member.circle.whole, topology=Topology(quorum.size), on_failure=self._failed, **self._options,
        )  # fmt: skip
        assert isinstance(sync, GradientSync)
        if member.memory.commit is not None:
            sync.services.state.restore(member.memory.state())
        return sync

    def _failed(self, error: Exception) -> None:
        if self._sync is not None:
            self._sync.close()
        self._member.failed(error)

    def _leave(self) -> None:
        self._keep()
        sync, self._sync = self._sync, None
        if sync is not None:
            self._past = added(self._past, sync.stats())
            sync.close()
        self._member.leave()

    def _keep(self) -> None:
        if self._sync is not None:
            self._member.memory.keep(self._sync.services.state.snapshot())

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        sync, member = self._sync, self._member
        if sync is None or member.attempt is None:
            return
        state, memory = sync.services.state, member.memory
        memory.step, memory.dropped = state.step, state.dropped
        memory.counts(member.attempt)
        if state.size > 1:
            memory.plan = sync.plan

    def _give(self) -> dict[str, Any]:
        self._keep()  # the training waits for the quorum
        return self._member.give()

    def _take(self, saved: dict[str, Any]) -> None:
        member = self._member
        if self._sync is not None and member.counted_without(saved):
            # The others had everything of this step, so this replica's part counts; it just was not told.
            self._sync.services.state.commit({name for name, _ in member.model.named_parameters()})
        self._leave()
        member.take(saved)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate locally, as ``GradientSync.no_sync``; a forward must have begun with the step."""
        if self._sync is None:
            yield
            return
        with self._sync.no_sync():
            yield

    def stats(self) -> Stats:
        """Return the counters since ``attach``, over all quorums; ``world_size`` and ``rank`` are the current ones."""
        found = self._past if self._sync is None else added(self._past, self._sync.stats())
        found = replace(found, method=self._method.name)
        return self._member.told_of(found, residual=self._method.has_residual)

    def residuals(self) -> dict[str, Tensor]:
        """Return this replica's residuals, by parameter, after the last step that counted."""
        self._keep()
        return dict(self._member.memory.own["residual"])


def check_settings(local: Local) -> None:
    if local.sync_every == "auto":
        raise ValueError(
            'sync_every="auto" measures a fixed set of ranks: name a number of steps, such as sync_every=64'
        )
    for name, unless in (("fragments", 1), ("fragment_sync_delay", 0), ("fragment_update_alpha", None), ("moments", {}),
                         ("inside", None), ("look", None), ("pace", "common")):  # fmt: skip
        if getattr(local, name) != unless:
            raise ValueError(f"under torchft the whole model is exchanged at a round's end: leave out {name}=")


class QuorumExchange:
    def __init__(
        self,
        member: QuorumMember,
        quorum: Quorum,
        local: Local,
        managed: Sequence[ManagedParameter],
        site: Site,
        options: RoundOptions,
    ) -> None:
        topology, model, start = Topology(quorum.size), member.model, options.start_compression_step
        weights, dense = {m.name: m.parameter for m in managed}, [m.name for m in managed if m.dense]
        self.rounds = Rounds(local, weights, dense, quorum.rank, topology, start=start, agree=site.agree)
        comm = None
        if quorum.size > 1:
            assert member.circle is not None
            comm = Communicator(member.circle.whole, topology, managed[0].device, member.quorums.timeout, asks=False)
        self._session = Session(local.method, comm or SingleRank(), State(quorum.rank, topology), None, {}, start=0)
        self.services = Services(model, member.optimizers, managed[0].device, self._session)
        self._travel: RoundRunner | None = None
        if comm is not None:
            buffers = buffers_of(model) if options.broadcast_buffers else []
            moments = Moments({}, member.optimizers, weights.values())
            try:
                comm.agree(
                    {"local steps": repr(local), "start": start, "shard": member.place} | model_facts(model, managed)
                )
                services = self.services
                beside = BuffersAndFrozen(buffers, [], services.gather, local.average_buffers)
                channels = open_channels(services, self.rounds, beside, moments)
                self._travel = RoundRunner(self.rounds, channels, beside, moments)
            except Exception as error:
                self.close(error)
                raise

    @property
    def fragment(self) -> Fragment:
        return self.rounds.fragments[0]  # the whole model

    def stepped(self, lr: float) -> None:
        self.rounds.stepped(lr)
        self._session.averaged(sum(x.nbytes for x in self.fragment.weights))

    def send(self) -> None:
        """Send, and wait until the others' has arrived. ``RuntimeError``: it will not."""
        if self._travel is not None:
            self._travel.send(self.rounds.fragments)
            self._travel.wait(self.fragment)

    def receive(self) -> None:
        if self._travel is not None:
            self._travel.receive(self.fragment)

    def merge(self) -> None:
        if self._travel is not None:
            self._travel.merge(self.fragment)

    def undo(self, codec: Mapping[str, Any]) -> None:
        self.fragment.state.restore(codec)
        self.fragment.due = None

    def stats(self) -> Stats:
        found = replace(self._session.stats("one replica: nothing is sent"), steps=self.rounds.count)
        if self._travel is None:
            return found
        return replace(
            found,
            note=f"{self.fragment.state.step} rounds, every {self.rounds.period} steps, by {found.method}",
            rejected_steps=self.fragment.rejected,
            bytes_sent=found.bytes_sent + self._travel.ledger().total,
            exposed_seconds=self._travel.seconds,
        )

    def close(self, error: Exception | None = None) -> None:
        """Return the communicator; after an error, without waiting for others. Idempotent."""
        if error is not None and self._session.broken is None:
            self._session.give_up(str(error))
        self.services.close()
        self._session.close()


class QuorumRounds(QuorumHandle):
    """One replica's local steps, across all quorums. Made by :func:`~thinwire.adapters.torchft.attach`."""

    def __init__(
        self, member: QuorumMember, local: Local, options: RoundOptions, managed: Sequence[ManagedParameter], site: Site
    ) -> None:
        self._local, self._options, self._managed, self._site = local, options, managed, site
        self._exchange: QuorumExchange | None = None  # None: the memory has everything that counts
        self._before: dict[str, Any] | None = None  # the codec's state before a round that may not count
        self._received = False
        self._waiting: set[int] = set()  # optimizers that have not stepped since the last count
        self._past = Stats("local", "", 0)
        super().__init__(member)

    def _enter(self, module: nn.Module, args: Any) -> None:
        """At the first training forward, run a round at once, which gives this replica the others' state."""
        if self._exchange is None and module.training and torch.is_grad_enabled():
            self._round()

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        everyone = {id(o) for o in self._member.optimizers}
        self._waiting = (self._waiting or everyone) - {id(optimizer)}
        if self._waiting or self._exchange is None:
            return
        self._exchange.stepped(self._exchange.rounds.rate(self._member.optimizers[0]))
        if self._exchange.rounds.ends:
            self._round()

    def _round(self) -> None:
        member, manager = self._member, self._member.quorums.manager
        self._site.changed()
        self._on_all(True)  # a site that has lost a rank stops here, before its other ranks wait for it in a quorum
        counts = False
        while not counts:
            self._start_quorum()
            self._settle(counts=False)
            self._try(member.quorums.latest)
            try:
                counts = manager.should_commit()
            except (TimeoutError, RuntimeError):
                self._on_all(True)  # says so if the vote of a rank that is gone was missing
                raise
        assert self._exchange is not None
        assert member.attempt is not None
        self._exchange.merge()
        self._settle(counts=True)
        member.memory.counts(member.attempt)

    def _start_quorum(self) -> None:
        """Start a quorum on all ranks of this site, or raise on all.

        Another site that has lost a rank after its check keeps all waiting, as its manager still answers. It ends when
        the quorum is late, and this one asks again.
        """
        for last in (not self._site.groups, True):
            found: Exception | None = None
            try:
                self._member.quorums.start()
            except Exception as error:
                found = error
            if self._on_all(found is None):
                return
            late = self._on_all(found is None or isinstance(found, TimeoutError))
            if last or not late:
                raise found or RuntimeError("another rank of this site could not join the quorum: see what it says")

    def _on_all(self, flag: bool) -> bool:
        """Return whether a flag is true on all ranks of this site; a whole model has one."""
        return bool(self._site.agree(torch.tensor(flag)))

    def _try(self, quorum: Quorum | None) -> None:
        """Make the exchange with a quorum's members, or report that it has failed: on all ranks of the site alike."""
        for part in (partial(self._connect, quorum), self._send, self._receive):
            found: RuntimeError | None = None
            try:
                part()
            except RuntimeError as error:
                found = error
            if not self._on_all(found is None):
                found = found or RuntimeError("another rank of this site could not make its exchange")
                if self._exchange is not None:
                    self._exchange.close(found)
                self._member.failed(found)
                return

    def _connect(self, quorum: Quorum | None) -> None:
        member = self._member
        if quorum is None:
            raise RuntimeError("torchft has made no process group")
        member.begins(quorum)
        if quorum is not member.met or self._exchange is None:
            self._leave()
            member.meet(quorum)
            self._exchange = QuorumExchange(member, quorum, self._local, self._managed, self._site, self._options)
            if member.memory.outer:
                member.memory.restore_rounds(self._exchange.rounds)

    def _send(self) -> None:
        assert self._exchange is not None
        self._before = self._exchange.fragment.state.snapshot()
        self._exchange.send()

    def _receive(self) -> None:
        assert self._exchange is not None
        self._exchange.receive()
        self._received = True
        self._exchange.services.gather(b"")  # wait until all have received everything, or raise

    def _settle(self, *, counts: bool) -> None:
        if self._before is not None and not counts:
            assert self._exchange is not None
            self._exchange.undo(self._before)
        self._before, self._received = None, False

    def _leave(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            self._member.memory.keep_rounds(exchange.rounds)
            self._past = added(self._past, exchange.stats())
            exchange.close()
        self._member.leave()

    def _give(self) -> dict[str, Any]:
        self._settle(counts=False)  # this is a round's end, before the exchange
        if self._exchange is not None:
            self._member.memory.keep_rounds(self._exchange.rounds)
        return self._member.give()

    def _take(self, saved: dict[str, Any]) -> None:
        self._settle(counts=self._received and self._member.counted_without(saved))
        self._leave()
        self._member.take(saved)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing to do: gradients are this replica's own anyway."""
        yield

    def stats(self) -> Stats:
        """Return the counters since ``attach``, over all quorums; ``steps`` are the optimizer's."""
        found = self._past if self._exchange is None else added(self._past, self._exchange.stats())
        found = replace(found, method="local")
        return self._member.told_of(found, residual=self._local.method.has_residual)

    def residuals(self) -> dict[str, Tensor]:
        """Return this replica's residuals, by parameter, after the last round that counted."""
        if self._before is not None:
            return dict(self._before["residual"])
        if self._exchange is not None:
            return dict(self._exchange.fragment.state.snapshot()["residual"])
        return dict(self._member.memory.own["residual"])
