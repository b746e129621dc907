"""Run rounds of programs on tensors that are not parameters, while training goes on.

``Services.run`` blocks; a channel does not. The same runner and executors run its programs and the gradients'
programs. A channel's programs run in the order of their numbers, on lanes of its own, so neither waits for the other's
turn. A channel may have its own topology, to group the ranks differently from the machines.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from thinwire.core.collectives.exchange import Lanes, Ledger, Pending
from thinwire.core.program import Collective, Scope, Topology
from thinwire.engine.executors.issuer import MakeProgram, OpIssuer
from thinwire.engine.executors.steps import ProgramSteps, executor_for
from thinwire.engine.ranks.communicator import Alone, Communicator
from thinwire.engine.session import Session


class Channel:
    """A way to run programs besides training. Made by :meth:`thinwire.engine.services.Services.channel` on all ranks.

    Args:
        communicator: the GradientSync's; None: one rank, whose programs run at once.
        topology: of the ranks, for the programs' groups.
        purpose: keeps its lanes apart from other channels'.
        depth: the largest number of exchanges that one program issues within each scope.
        session: the GradientSync's, which a failure here ends; None with one rank, where none can fail.
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
        """Whether a round has begun and has not been waited for."""
        return self._open

    def begin(self, names: Sequence[Sequence[str]], make: MakeProgram) -> None:
        """Open a round of ``len(names)`` programs; ``make(i)`` returns the i-th when it is ready.

        Raises:
            RuntimeError: the previous round has not been waited for.
        """
        if self._open:
            raise RuntimeError("a channel's round begins when the one before has ended: call wait() first")
        self._open = bool(names)
        if names:
            self._steps.begin(0 if self._session is None else self._session.state.step, names, make)

    def ready(self, index: int, *, inline: bool = True) -> None:
        """Say that a program's data are there. Call in any order; exchanges are issued in the order of the numbers.

        ``inline``: it has one exchange, and may run in the thread that calls this and ``wait``.
        """
        self._steps.executor.ready(index, inline=inline)

    def wait(self) -> float:
        """Wait until the round has ended. Return the seconds that this took.

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
        """Stop the executor and give the process groups back. Idempotent."""
        if self._lanes is not None:
            self._steps.executor.close()
            self._lanes.release(broken=broken or self._broken or self._open)
            self._lanes = None


class _Purposed(OpIssuer):
    """An issuer whose ops all go to the lanes of one purpose."""

    def __init__(self, lanes: Lanes, ledger: Ledger, purpose: str) -> None:
        super().__init__(lanes, ledger, lambda *_: None)
        self._purpose = purpose

    def issue(self, op: Collective, scope: Scope, round_: int, bucket: int, purpose: str = "") -> Pending:
        """Issue an op on this purpose's lanes, whatever ``purpose`` says."""
        return super().issue(op, scope, round_, bucket, self._purpose)
