"""What other packages need from a handle of ``attach``: its ranks, agreement, and programs on other tensors."""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import nn

from thinwire.core.pricing.costs import Costs, assumed_compute
from thinwire.core.program import Method, Program, Scope, State, Topology
from thinwire.core.program.ops import in_own_modes
from thinwire.engine.backward_hooks import BackwardHooks
from thinwire.engine.controller.pilot import PlanController
from thinwire.engine.hooks import ModuleHook, WithoutHooks
from thinwire.engine.session import Channel, Session

if TYPE_CHECKING:
    from thinwire.engine.local.site import Site

C = TypeVar("C", bound="Closing")


class Stateful(Protocol):
    """Something with state of its own, in plain values and tensors, that belongs to the training."""

    def state_dict(self) -> dict[str, Any]:
        """Return its state on this rank. Values that differ between ranks have keys that no other rank uses."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state; on another number of ranks, the union of all ranks' keys."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class CheckedState:
    """A saved state that was checked and fits: call ``restore``, then ``adopt``."""

    restore: Callable[[], Callable[[], None]]  # returns what undoes it, but for weights; all or nothing
    adopt: Callable[[], None]  # puts the saved plan in force, if there is one; collective


class Closing(abc.ABC):
    @abc.abstractmethod
    def close(self) -> None: ...

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class Handle(Closing):
    services: Services  # for optimizers, K-FAC and other packages

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abc.abstractmethod
    def _fitting(self, state: Mapping[str, Any]) -> CheckedState: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over this rank's ``state_dict``; on another number of ranks, the union of all ranks'."""
        found = fitting(self, state)
        found.restore()
        found.adopt()


def fitting(handle: Handle, state: Mapping[str, Any]) -> CheckedState:
    """Return what a handle would take over of a state. Changes nothing; ``ValueError`` if it does not fit."""
    found = in_own_modes()(handle._fitting)(state)
    return CheckedState(in_own_modes()(found.restore), in_own_modes()(found.adopt))


_attached: weakref.WeakValueDictionary[int, Handle] = weakref.WeakValueDictionary()


def _held(handle: Handle, *_: Any) -> None:
    """Do nothing: a hook that holds a handle, and costs a step nothing."""


def attached_to(model: nn.Module) -> Handle | None:
    """Return the model's open ``attach`` handle, or None. A copy of the model has none."""
    return _attached.get(id(model))


def handles() -> list[Handle]:
    return list(_attached.values())


class Services:
    """The services of one handle.

    ``apart``: each rank has weights and optimizer states of its own; ``own_buffers``: buffers that nobody sends.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        device: torch.device,
        session: Session,
        source: BackwardHooks | None = None,
        controller: PlanController | None = None,
        *,
        apart: bool = False,
    ) -> None:
        self.apart, self.own_buffers = apart, False
        self.model, self.optimizers, self.device = model, tuple(optimizers), device
        self.session, self.source, self.controller = session, source, controller
        self.companions: dict[str, Stateful] = {}  # saved and loaded with the handle, by name
        self.handles: list[Any] = []  # removed when it is closed
        self.site: Site | None = None  # of a model that is sharded over several ranks
        self._channels: list[Channel] = []

    def remember(self, handle: Handle) -> None:
        """Let model and optimizers hold the handle until it is closed: a script may keep no reference."""
        _attached[id(self.model)] = handle
        hold = ModuleHook(_held, handle)
        self.handles += [WithoutHooks(self.model), self.model.register_load_state_dict_post_hook(hold)]
        self.handles += [optimizer.register_load_state_dict_post_hook(hold) for optimizer in self.optimizers]

    @property
    def method(self) -> Method:
        return self.session.method

    @property
    def state(self) -> State:
        return self.session.state

    @property
    def topology(self) -> Topology:
        return self.session.topology

    @property
    def rank(self) -> int:
        return self.session.rank

    @property
    def scaler(self) -> Any:
        return self.session.scaler

    @property
    def synchronizing(self) -> bool:
        return self.source is None or self.source.enabled

    def run(self, program: Program, *, lane: str = "control") -> Any:
        """Run a program on tensors that are not parameters, now, in the calling thread, on lanes of its own.

        All ranks must call it at the same point with programs that issue the same ops. Return the program's value.
        """
        return self.session.comm.run(program, lane)

    def channel(self, purpose: str, depth: Mapping[Scope, int], topology: Topology | None = None) -> Channel:
        """Return a :class:`Channel` beside training; ``topology`` may group the ranks otherwise. Collective."""
        made = Channel(self.session, topology or self.topology, purpose, depth)
        self._channels.append(made)
        return made

    def probe(self, *, largest_bytes: int, seconds: float) -> Costs:
        """Return what exchanges cost on this network: as measured for the plan, or measured now on all ranks.

        All ranks must call it.
        """
        comm = self.session.comm
        if self.controller is not None and self.controller.costs is not None:
            return self.controller.costs
        if len(comm.ranks) == 1:
            return Costs({}, assumed_compute())
        from thinwire.predict.measure.probe import probe

        found = probe(comm.group, self.topology, largest_bytes=largest_bytes, seconds=seconds,
                      kernel_seconds=seconds / 4, device=comm.device)  # fmt: skip
        return found.costs

    def expect(self, names: Iterable[str]) -> None:
        """Name the only parameters that can get gradients in the next exchanged backward. For one step; local.

        A bucket then starts with the last of them, even if others are unused. Another's gradient is an error.
        """
        if self.source is not None:
            self.source.expect(names)

    def bind(self, optimizers: Iterable[torch.optim.Optimizer], sync: Any, scaler: Any) -> None:
        """Tell optimizers that have ``attached(sync, scaler)`` which handle they work with, until it is closed."""
        for optimizer in optimizers:
            if callable(meet := getattr(optimizer, "attached", None)):
                self.handles.append(meet(sync, scaler))

    def gather(self, message: bytes, call: str = "") -> list[bytes]:
        """Return every rank's message. ``call``: of the user's, which all ranks must make."""
        return self.session.comm.gather(message, call)

    def gather_everywhere(self, message: bytes, call: str = "") -> list[bytes]:
        """Return the messages of these ranks; of sharded models those of all sites' ranks."""
        rows = self.gather(message, call)
        return rows if self.site is None else self.site.gather(rows)

    def agree(self, flag: bool) -> bool:
        """Return whether any rank raises the flag; equal on all ranks."""
        return any(row[0] for row in self.gather(bytes([flag])))

    def agree_on(self, facts: dict[str, Any], doing: str = "agreeing on the plan") -> None:
        """Raise ``ValueError`` on all ranks, naming the difference, unless all have the same facts (plain data)."""
        self.session.comm.agree(facts, doing)

    def close(self) -> None:
        """Remove the handles, and close the companions and channels; the session is the owner's to close."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        for companion in list(self.companions.values()):
            companion.close()
        self.companions.clear()
        for channel in self._channels:
            channel.close(broken=self.session.broken is not None)
        self._channels.clear()
        if (found := attached_to(self.model)) is not None and found.services is self:
            del _attached[id(self.model)]
