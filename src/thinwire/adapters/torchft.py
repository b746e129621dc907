"""Training that goes on when a replica dies: torchft decides who is in, thinwire exchanges.

torchft's lighthouse makes quorums, its Manager heals who comes from who is ahead, and its ``should_commit`` says
whether a step counts. Each quorum has a communicator of its own here. What a method remembers goes from one to the
next: as it was after the last step that counted.

Who gives a step up is certain that it counts for nobody, or will hear: a replica votes when it has had everything, and
steps when it has all votes. A vote that nobody receives leaves its sender with a step that the others make again
without it. So members of a new quorum compare which step counted last, and in which quorum; the later quorum is right.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.adapters.torchft_manager import Quorum, Quorums, enter, leave, told
from thinwire.engine import attach as engine
from thinwire.engine.stats import Stats
from thinwire.engine.sync import GradientSync
from thinwire.local import Local
from thinwire.local.named import named_local
from thinwire.methods.registry import resolve
from thinwire.program import Method, Plan, Topology

logger = logging.getLogger("thinwire")

_KEY = "thinwire"  # of our part of what the manager hands to who comes
_RUNS = 100
Attempt = tuple[int, int]
"""The manager's step and the quorum of an exchange."""


def attach(
    model: nn.Module,
    optimizer: Any,
    method: Method | str = "ssgd",
    *,
    manager: Any,
    **options: Any,
) -> QuorumSync:
    """Average gradients over the replicas of torchft's quorum, in place of its ``DistributedDataParallel``.

    The loop stays torchft's: ``zero_grad`` of its optimizer starts the quorum, ``step`` asks ``should_commit``. All
    replicas call this before their first quorum. Model, optimizer and what the method shares are registered with the
    manager, so that who comes is given them.

    Args:
        model: on the CPU, bare.
        optimizer: torchft's, around yours, or yours; or a list.
        method: a name with its options, or an instance; not decoupled, and not "auto".
        manager: a ``torchft.Manager(use_async_quorum=False)``, whose ``timeout`` is that of exchanges.
        options: the method's, and those of :func:`thinwire.attach`.

    Raises:
        ValueError: bad options, or a manager that cannot be served; the message says what to write.
    """
    if isinstance(method, Local) or named_local(method, dict(options)) is not None:
        raise ValueError("local steps do not run under torchft yet: name a method that exchanges gradients")
    if isinstance(method, str) and method.lower() == "auto":
        raise ValueError('"auto" measures ranks that stay: name a method')
    for name in ("process_group", "topology", "timeout", "on_failure"):
        if name in options:
            raise ValueError(f"{name}= is the manager's affair here: leave it out")
    if any(p.device.type != "cpu" for p in model.parameters()):
        raise ValueError("under torchft thinwire exchanges from CPUs so far: move the model there")
    names = set(options) - set(inspect.signature(engine.attach).parameters)
    chosen = resolve(method, **{name: options.pop(name) for name in names})
    if chosen.decoupled:
        raise ValueError("a decoupled method updates weights after should_commit was asked: leave out decoupled=True")
    listed = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    inner = [getattr(o, "optim", o) for o in listed]
    return QuorumSync(model, inner, chosen, Quorums(manager), options)


@dataclass
class Memory:
    """What goes from one quorum to the next, as it was after the last step that counted.

    Attributes:
        own: residuals, their offsets and local fields, of this replica alone.
        shared: fields that are equal on all replicas.
        step, dropped: counters of the method's state, equal on all.
        plan: in force; None: none was made of several replicas.
        commit: the manager's step and the quorum of the last exchange that counted; None: there was none.
        runs: first step and quorum of the steps that counted, one run for each quorum, the last hundred.
    """

    own: dict[str, Any] = field(default_factory=lambda: {"residual": {}, "offset": {}, "local": {}})
    shared: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    step: int = 0
    dropped: int = 0
    plan: Plan | None = None
    commit: Attempt | None = None
    runs: list[Attempt] = field(default_factory=list)

    def counts(self, attempt: Attempt) -> None:
        """An exchange has counted."""
        if not self.runs or self.runs[-1][1] != attempt[1]:
            self.runs = [*self.runs[-_RUNS:], attempt]
        self.commit = attempt

    def counted(self, attempt: Attempt) -> bool:
        """Whether an exchange has."""
        step, quorum = attempt
        run = [number for first, number in self.runs if first <= step][-1:]
        return self.commit is not None and step <= self.commit[0] and run == [quorum]

    def take_shared(self, saved: Mapping[str, Any]) -> None:
        """Take over what is equal on all replicas."""
        self.shared, self.step, self.dropped = saved["shared"], saved["step"], saved["dropped"]
        self.plan = Plan.from_json(saved["plan"]) if saved["plan"] else None
        self.commit, self.runs = saved["commit"], saved["runs"]

    def shared_part(self) -> dict[str, Any]:
        """As plain values and tensors."""
        return {
            "shared": self.shared,
            "step": self.step,
            "dropped": self.dropped,
            "plan": self.plan.to_json() if self.plan else None,
            "commit": self.commit,
            "runs": self.runs,
        }


@dataclass
class Losses:
    """What was owed and will not be paid.

    Attributes:
        identity: of this process, as the others know it.
        members: of the last quorum.
        gone: who was a member and is none.
        norm: of what this process has had to forget.
    """

    identity: int = field(default_factory=lambda: secrets.randbits(62))
    members: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    norm: float = 0.0

    def meet(self, members: set[int]) -> None:
        """Another quorum."""
        self.gone = (self.gone | self.members) - members
        self.members = members

    def forget(self, residuals: Mapping[str, Tensor]) -> None:
        """This process' own."""
        self.norm += sum(float(x.norm()) ** 2 for x in residuals.values()) ** 0.5


class QuorumSync:
    """One replica's exchange, through all quorums. Made by :func:`attach`."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        method: Method,
        quorums: Quorums,
        options: Mapping[str, Any],
    ) -> None:
        self._model, self._optimizers, self._quorums = model, list(optimizers), quorums
        self._method, self._options = method, dict(options)
        self._memory = Memory(plan=self._options.pop("plan", None))
        self._sync: GradientSync | None = None
        self._formed: Quorum | None = None
        self._attempt: Attempt | None = None  # the exchange under way
        self._losses = Losses()
        self._past = Stats("", "", 0)
        self._handles: list[Any] = [o.register_step_post_hook(self._stepped) for o in self._optimizers]
        for module in model.modules():
            if module is model or any(True for _ in module.parameters(recurse=False)):
                self._handles.append(module.register_forward_pre_hook(self._enter))
        quorums.manager.register_state_dict_fn(_KEY, self._load, self._give)

    # --- quorums -------------------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: Any) -> None:
        """A forward begins: if there is another quorum since the last one, meet its members."""
        quorum = self._quorums.latest
        if quorum is None:
            return
        self._attempt = (self._quorums.manager.current_step(), quorum.number)
        if quorum is not self._formed:
            self._leave()
            self._formed = quorum
            self._meet(quorum)

    def _meet(self, quorum: Quorum) -> None:
        memory, timeout = self._memory, self._quorums.timeout
        try:
            if quorum.size > 1:
                enter(quorum, timeout)
            self._compare(quorum)
            sync = engine.attach(
                self._model, self._optimizers, self._method, plan=memory.plan, timeout=timeout,
                topology=Topology(quorum.size), on_failure=self._failed, **self._options,
            )  # fmt: skip
        except RuntimeError as error:
            leave()
            self._failed(error)
            return
        assert isinstance(sync, GradientSync)
        counters = {"step": memory.step, "dropped": memory.dropped}
        if memory.commit is not None:
            sync.services.state.restore({**memory.own, "shared": memory.shared, **counters})
        self._sync = sync

    def _compare(self, quorum: Quorum) -> None:
        """Raise ``RuntimeError``, on all members, unless the same step counted last for all of them."""
        step, number = self._memory.commit or (-1, -1)
        mine = (step, number, self._losses.identity)
        everyone = [mine] if quorum.size == 1 else told(list(mine))
        self._losses.meet({row[2] for row in everyone})
        latest = max(row[:2] for row in everyone)
        if latest != mine[:2]:
            self._quorums.fall_behind()
        if any(row[:2] != latest for row in everyone):
            raise RuntimeError(
                "a replica has kept a step that the others have made again without it: it will be healed"
            )

    def _failed(self, error: Exception) -> None:
        """The exchange has failed, so the step does not count. The others must learn of it at once."""
        logger.warning("thinwire: the step does not count: %s", error)
        self._quorums.manager.report_error(error)
        if self._sync is not None:
            self._sync.close()
        leave()

    def _leave(self) -> None:
        """Keep what counts, and give the communicator back."""
        sync, self._sync = self._sync, None
        if sync is not None:
            self._keep(sync)
            self._past = _added(self._past, sync.stats())
            sync.close()
        leave()

    def _keep(self, sync: GradientSync) -> None:
        found = sync.services.state.snapshot()
        self._memory.own = {kind: found[kind] for kind in ("residual", "offset", "local")}
        self._memory.shared = found["shared"]

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """The step counts."""
        sync, memory = self._sync, self._memory
        if sync is None or self._attempt is None:
            return
        state = sync.services.state
        memory.step, memory.dropped = state.step, state.dropped
        memory.counts(self._attempt)
        if state.size > 1:
            memory.plan = sync.plan

    # --- what the manager hands to who comes -----------------------------------------------------------------------

    def _give(self) -> dict[str, Any]:
        """Called while the training waits for the quorum."""
        if self._sync is not None:
            self._keep(self._sync)
        return {
            "model": self._model.state_dict(),
            "optimizers": [o.state_dict() for o in self._optimizers],
            **self._memory.shared_part(),
        }

    def _load(self, saved: dict[str, Any]) -> None:
        """This replica has come, or has fallen behind."""
        theirs, memory = Memory(), self._memory
        theirs.take_shared(saved)
        if self._sync is not None and self._attempt is not None and theirs.counted(self._attempt):
            # The others had everything of this step, so this replica's part counts; only it has not heard so.
            self._sync.services.state.commit({name for name, _ in self._model.named_parameters()})
        self._leave()
        if memory.commit is not None and not theirs.counted(memory.commit):
            self._losses.forget(memory.own["residual"])  # made for a step that does not count
        else:
            theirs.own = memory.own
        self._model.load_state_dict(saved["model"])
        for optimizer, one in zip(self._optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(one)
        self._memory = theirs

    # --- what users call -------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate locally, as ``GradientSync.no_sync``; a forward must have begun with the step."""
        if self._sync is None:
            yield
            return
        with self._sync.no_sync():
            yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the averaged gradients by their global norm. Returns the norm."""
        return torch.nn.utils.clip_grad_norm_(self._model.parameters(), max_norm, norm_type, error_if_nonfinite)

    def stats(self) -> Stats:
        """Counters since ``attach``, over all quorums; ``world_size`` and ``rank`` are those of the one in force."""
        found = self._past if self._sync is None else _added(self._past, self._sync.stats())
        unknown = self._losses.gone and self._method.has_residual
        lost = None if unknown else self._losses.norm
        return dataclasses.replace(found, method=self._method.name, lost_residual_norm=lost)

    @property
    def quorum(self) -> Quorum | None:
        """The one whose members exchange; None: there was none yet."""
        return self._formed

    def residuals(self) -> dict[str, Tensor]:
        """What this replica owes, by parameter, after the last step that counted."""
        if self._sync is not None:
            self._keep(self._sync)
        return dict(self._memory.own["residual"])

    def close(self) -> None:
        """Take the hooks out and give the communicator back. Idempotent; the manager is the caller's to shut down."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._leave()

    def __enter__(self) -> QuorumSync:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _added(past: Stats, now: Stats) -> Stats:
    """Counters over all quorums."""
    names = ("rejected_steps", "dropped_steps", "bytes_sent", "dense_bytes", "exposed_seconds")
    return dataclasses.replace(now, **{name: getattr(past, name) + getattr(now, name) for name in names})
