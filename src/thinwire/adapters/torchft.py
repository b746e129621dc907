"""Training that continues when a replica dies: torchft decides on the members, thinwire exchanges.

torchft's lighthouse forms quorums, its Manager heals joining replicas from one that is ahead, and its ``should_commit``
decides whether a step counts. Here, each quorum has its own communicator. A method's state is passed from one quorum to
the next, as it was after the last step that counted.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.adapters.torchft_manager import Quorum, Quorums, leave
from thinwire.adapters.torchft_member import QuorumHandle, QuorumMember, added
from thinwire.adapters.torchft_rounds import QuorumRounds, RoundOptions, check_settings
from thinwire.core.methods.registry import resolve
from thinwire.core.program import Method, Topology
from thinwire.engine import attach as engine
from thinwire.engine.local.settings import Local, named_local
from thinwire.engine.stats import Stats
from thinwire.engine.sync import GradientSync


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
        model: on the CPU, not wrapped.
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
    if any(p.device.type != "cpu" for p in model.parameters()):
        raise ValueError("under torchft thinwire so far exchanges only from CPUs: move the model there")
    listed = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    inner = [getattr(o, "optim", o) for o in listed]
    of_rounds = {f.name: options[f.name] for f in fields(RoundOptions) if f.name in options}
    local = named_local(method, {name: x for name, x in options.items() if name not in of_rounds})
    if local is not None:
        if any(one is not o for one, o in zip(inner, listed)):
            raise ValueError("local steps ask should_commit once a round: pass your own optimizer, not torchft's")
        check_settings(local)
        return QuorumRounds(QuorumMember(model, inner, Quorums(manager)), local, RoundOptions(**of_rounds))
    assert not isinstance(method, Local)  # handled by named_local
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

    # --- quorums -------------------------------------------------------------------------------------------------

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
        sync = engine.attach(
            member.model, member.optimizers, self._method, plan=member.memory.plan, timeout=member.quorums.timeout,
            topology=Topology(quorum.size), on_failure=self._failed, **self._options,
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
        """Keep the state that counts, and return the communicator."""
        self._keep()
        sync, self._sync = self._sync, None
        if sync is not None:
            self._past = added(self._past, sync.stats())
            sync.close()
        leave()

    def _keep(self) -> None:
        if self._sync is not None:
            self._member.memory.keep(self._sync.services.state.snapshot())

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Note that the step counts."""
        sync, member = self._sync, self._member
        if sync is None or member.attempt is None:
            return
        state, memory = sync.services.state, member.memory
        memory.step, memory.dropped = state.step, state.dropped
        memory.counts(member.attempt)
        if state.size > 1:
            memory.plan = sync.plan

    # --- what the manager hands to who comes -----------------------------------------------------------------------

    def _give(self) -> dict[str, Any]:
        """Return the state for joining replicas; called by the manager while the training waits for the quorum."""
        self._keep()
        return self._member.give()

    def _take(self, saved: dict[str, Any]) -> None:
        """Load a state; called by the manager when this replica has joined or fallen behind."""
        member = self._member
        if self._sync is not None and member.counted_without(saved):
            # The others had everything of this step, so this replica's part counts; it just was not told.
            self._sync.services.state.commit({name for name, _ in member.model.named_parameters()})
        self._leave()
        member.take(saved)

    # --- what users call -------------------------------------------------------------------------------------------

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
