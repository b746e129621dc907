"""A second way through the engine: rounds of programs on tensors that are not parameters, while training goes on.

``GradientSync.run`` blocks; a channel does not. Its programs run by the same runner and executors as those of the
gradients, in the order of their numbers, on lanes of its own, so that neither waits for the other's turn. A topology of
its own may group the ranks otherwise than the machines do.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from thinwire.collectives.lanes import Lanes
from thinwire.collectives.ledger import Ledger
from thinwire.collectives.transport import Pending
from thinwire.engine.executors.issuer import MakeProgram, OpIssuer
from thinwire.engine.executors.steps import ProgramSteps, executor_for
from thinwire.engine.ranks.communicator import Alone, Communicator
from thinwire.engine.session import Session
from thinwire.program import Collective, Scope, Topology


class Channel:
    """Made by :meth:`thinwire.engine.services.Services.channel`; all ranks must use it alike.

    Args:
        communicator: of the GradientSync; None: one rank, whose programs run at once.
        topology: of the ranks, for the programs' groups.
        purpose: keeps its lanes apart from others'.
        depth: exchanges that one program issues within each scope, at most.
        session: of the GradientSync, which a failure here ends; None with one rank, where none can fail.
    """

    def __init__(
        self,
        communicator: Communicator | None,
        topology: Topology,
        purpose: str,
        depth: Mapping[Scope, int],
        session: Session | None,
    ) -> None:
        self.topology, self.ledger = topology, Ledger()
        self.rank = communicator.rank if communicator is not None else 0
        self._session = session
        self._open = self._broken = False
        self._lanes: Lanes | None = None
        if communicator is None:
            self._steps = Alone(torch.device("cpu")).steps
        else:
            self._lanes = lanes = communicator.lanes_for(purpose, depth, topology)
            issuer = _Purposed(lanes, self.ledger, purpose)
            executor = executor_for(communicator.backend, issuer, communicator.device)
            self._steps = ProgramSteps(executor, communicator.sentence)

    @property
    def under_way(self) -> bool:
        """Whether a round has begun and nobody has waited for it."""
        return self._open

    def begin(self, names: Sequence[Sequence[str]], make: MakeProgram) -> None:
        """Open a round of ``len(names)`` programs; ``make(i)`` gives the i-th when it is ready.

        Raises:
            RuntimeError: the round before has not been waited for.
        """
        if self._open:
            raise RuntimeError("a channel's round begins when the one before has ended: call wait() first")
        self._open = bool(names)
        if names:
            self._steps.begin(0 if self._session is None else self._session.state.step, names, make)

    def ready(self, index: int, *, inline: bool = True) -> None:
        """The data of a program are there. In any order; exchanges are issued in that of the numbers.

        ``inline``: it has one exchange, and may be run by who calls this and ``wait``.
        """
        self._steps.executor.ready(index, inline=inline)

    def wait(self) -> float:
        """Block until the round has ended. Returns the seconds that this took.

        Raises:
            RuntimeError: an exchange failed; the GradientSync is then unusable.
        """
        if not self._open:
            return 0.0
        self._open = False
        started = time.perf_counter()
        if failure := self._steps.finish():
            self._broken = True
            assert self._session is not None
            self._session.fail(failure)
        return time.perf_counter() - started

    def close(self, *, broken: bool = False) -> None:
        """End the executor and give the process groups back. Idempotent."""
        if self._lanes is not None:
            self._steps.executor.close()
            self._lanes.release(broken=broken or self._broken or self._open)
            self._lanes = None


class _Purposed(OpIssuer):
    """An issuer whose ops all go to lanes of one purpose."""

    def __init__(self, lanes: Lanes, ledger: Ledger, purpose: str) -> None:
        super().__init__(lanes, ledger, lambda *_: None)
        self._purpose = purpose

    def issue(self, op: Collective, scope: Scope, round_: int, bucket: int, purpose: str = "") -> Pending:
        """As of the base class."""
        return super().issue(op, scope, round_, bucket, self._purpose)
