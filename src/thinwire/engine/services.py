"""What other packages need from a GradientSync: its ranks, agreement, and programs on other tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from thinwire.core.pricing.costs import Costs, assumed_compute
from thinwire.core.program import Method, Program, Scope, State, Topology
from thinwire.engine.channel import Channel
from thinwire.engine.executors.alone import run_alone
from thinwire.engine.ranks.communicator import Communicator
from thinwire.engine.session import Session
from thinwire.engine.stateful import Stateful

if TYPE_CHECKING:
    from thinwire.engine.controller.controller import Controller
    from thinwire.engine.source import GradientSource


class Services:
    """The services of one GradientSync.

    Args:
        model: the attached model.
        optimizers: of its parameters.
        device: of its gradients.
        session: of its exchange.
        source: of its gradients; None: nothing is exchanged.
        controller: of its plans; None: likewise.

    Attributes:
        session, source, controller: as above.
        companions: objects that are saved and loaded with the GradientSync, by name.
        handles: removed when it is closed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        device: torch.device,
        session: Session,
        source: GradientSource | None,
        controller: Controller | None,
    ) -> None:
        self.model, self.optimizers, self.device = model, tuple(optimizers), device
        self.session, self.source, self.controller = session, source, controller
        self.companions: dict[str, Stateful] = {}
        self.handles: list[Any] = []
        self._channels: list[Channel] = []

    @property
    def method(self) -> Method:
        """The method that runs."""
        return self.session.method

    @property
    def state(self) -> State:
        return self.session.state

    @property
    def topology(self) -> Topology:
        """Which rank is on which machine."""
        return self.session.topology

    @property
    def rank(self) -> int:
        return self.session.rank

    @property
    def scaler(self) -> Any:
        """The GradScaler in use, or None."""
        return self.session.loss_scale.scaler

    @property
    def synchronizing(self) -> bool:
        """Whether the next backward will be exchanged: False inside ``no_sync``."""
        return self.source is None or self.source.enabled

    def run(self, program: Program, *, lane: str = "control") -> Any:
        """Run a program on tensors that are not parameters, now, in the calling thread, on lanes of its own.

        All ranks must call it at the same point with programs that issue the same ops. Return the program's value.
        """
        comm = self.session.comm
        return run_alone(program) if comm is None else comm.run(program, lane)

    def channel(self, purpose: str, depth: Mapping[Scope, int], topology: Topology | None = None) -> Channel:
        """Return a channel, which runs programs on tensors that are not parameters while training continues.

        All ranks must call it at the same point. See :class:`~thinwire.engine.channel.Channel`.

        Args:
            purpose: keeps its lanes apart from other channels'.
            depth: the largest number of exchanges that one program issues within each scope.
            topology: groups the ranks, if differently from the machines.
        """
        comm = self.session.comm if isinstance(self.session.comm, Communicator) else None
        made = Channel(comm, topology or self.topology, purpose, depth, self.session)
        self._channels.append(made)
        return made

    def probe(self, *, largest_bytes: int, seconds: float) -> Costs:
        """Return what exchanges cost on this network: as the plan's pilot measured it, or measured now on all ranks.

        All ranks must call it.
        """
        pilot, comm = None if self.controller is None else self.controller.pilot, self.session.comm
        if pilot is not None and pilot.costs is not None:
            return pilot.costs
        if not isinstance(comm, Communicator):
            return Costs({}, assumed_compute())
        from thinwire.predict.measure.probe import probe

        found = probe(comm.members.group, self.topology, largest_bytes=largest_bytes, seconds=seconds,
                      kernel_seconds=seconds / 4, device=comm.device)  # fmt: skip
        return found.costs

    def expect(self, names: Iterable[str]) -> None:
        """Name the only parameters that can get gradients in the next exchanged backward. For one step; local.

        A bucket then starts once these of its parameters have gradients. It need not wait for the end of backward if
        some are unused. A gradient of another parameter is an error.

        Raises:
            ValueError: an unknown name, or a decoupled method, which follows the order of the forward.
        """
        if self.source is not None:
            self.source.expect(names)

    def bind(self, optimizers: Iterable[torch.optim.Optimizer], sync: Any, scaler: Any) -> None:
        """Tell optimizers that have ``attached(sync, scaler)`` which handle they work with, until it is closed."""
        for optimizer in optimizers:
            if callable(meet := getattr(optimizer, "attached", None)):
                self.handles.append(meet(sync, scaler))

    def gather(self, message: bytes) -> list[bytes]:
        """Return every rank's message, in rank order."""
        comm = self.session.comm
        return [message] if comm is None else comm.gather(message)

    def agree(self, flag: bool) -> bool:
        """Return whether any rank raises the flag; equal on all ranks."""
        return any(row[0] for row in self.gather(bytes([flag])))

    def agree_on(self, facts: dict[str, Any]) -> None:
        """Raise ``ValueError`` on all ranks, naming the difference, unless all have the same facts (plain data)."""
        if self.session.comm is not None:
            self.session.comm.agree(facts)

    def close(self) -> None:
        """Remove the handles, and close the companions and channels."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        for companion in list(self.companions.values()):
            companion.close()
        self.companions.clear()
        for channel in self._channels:
            channel.close(broken=self.session.broken is not None)
        self._channels.clear()
