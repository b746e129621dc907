"""One step after another of an exchange: what ``attach``, DDP's hook and FSDP2's replicas have in common.

No hooks and no autograd: a source of gradients says when a bucket is ready, and puts its average where it belongs.

begin     what the last step left is settled; the loss scale and the method of this step are known
run       the source's own: the executor runs the buckets' programs
finish    all programs have ended, or one sentence says which failed, and who was late
commit    what the programs have staged is in force, or pending until an optimizer has used the gradients
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from thinwire.collectives.ledger import Ledger
from thinwire.engine.ranks.communicator import Alone, Communicator
from thinwire.engine.ranks.late_ranks import in_words
from thinwire.engine.state.restart import warn_if_state_missing
from thinwire.engine.state.scaler import LossScale
from thinwire.engine.state.step_watch import StepWatch, owned
from thinwire.engine.stats import BucketStats, Stats
from thinwire.methods.start import exact_method, start_method
from thinwire.program import Method, State, Topology

INTERRUPTED = "an earlier backward ended with an exception in the middle of the exchange"


@dataclass
class Counters:
    """What is added up over steps; see :class:`~thinwire.engine.stats.Stats`."""

    rejected: int = 0
    dense_bytes: float = 0.0
    exposed_seconds: float = 0.0
    deferred_seconds: float = 0.0

    def sent(self, nbytes: int, ranks: int) -> None:
        """That many bytes of gradients were averaged: what S-SGD would have sent for them."""
        self.dense_bytes += 2 * (ranks - 1) * nbytes / ranks


class Session:
    """Of one handle that a user holds.

    Args:
        method: that runs.
        comm: of the ranks; None: there is nothing to exchange, or not yet.
        state: of the method.
        scaler: the GradScaler in use; None: found at its first ``scaler.step(optimizer)``.
        names: of the parameters, by ``id``.
        start: steps that are exact before the method begins; None: as it says itself.
        named: whose state is saved, where another one stands in for it: on a single rank, or while "auto" measures.
        expected: an optimizer was named, so its steps will come.
        before_step: called with each optimizer that is about to step; None: ``find_scaler``.

    Attributes:
        dense: the method of what is not compressed.
        first: the method of the steps before it begins.
        starting: it has not begun: ``first`` runs in its stead.
        running: a step is under way.
        broken: why there can be no other step.
    """

    def __init__(
        self,
        method: Method,
        comm: Communicator | Alone | None,
        state: State,
        scaler: Any,
        names: Callable[[], Mapping[int, str]],
        *,
        start: int | None = None,
        named: Method | None = None,
        expected: bool = False,
        before_step: Callable[[torch.optim.Optimizer], None] | None = None,
    ) -> None:
        self.named, self.comm, self.state = named or method, comm, state
        self.dense = exact_method(method)
        self.run_as(method, start)
        self.starting = self.running = False
        self.broken: str | None = None
        self.loss_scale = LossScale(scaler)
        self.counters = Counters()
        self.watch = StepWatch(state, names, expected=expected, before=before_step or self.find_scaler)

    def run_as(self, method: Method, start: int | None) -> None:
        """Run a method from the next step on; ``start``: as above."""
        self.method, self.first = method, start_method(method, self.state.topology, start)
        self.state.start = method.start_steps if start is None else start

    @property
    def topology(self) -> Topology:
        """Which rank sits where."""
        return self.state.topology

    @property
    def rank(self) -> int:
        return self.state.rank

    def facts(self) -> dict[str, Any]:
        """What ranks must have alike."""
        options = {key: str(value) for key, value in self.method.options().items()}
        start = {"start_compression_step": self.state.start, "starts as": self.first.name}
        return {"method": self.method.name, "options": options} | start

    def method_of(self, dense: bool) -> Method:
        """The one that runs in this step, for what is ``dense`` or not."""
        return self.dense if dense else self.first if self.starting else self.method

    def find_scaler(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step: a GradScaler that nobody has named may be calling it."""
        if self.loss_scale.scaler is not None or self.comm is None or not self.method.has_residual:
            return
        if owned(optimizer, self.watch.names()):
            self.loss_scale.find(self.state, self.comm.device)

    # --- one step ------------------------------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Raise ``RuntimeError`` after a failure, with its reason."""
        if self.broken is not None:
            raise RuntimeError(f"the exchange is unusable after an earlier failure: {self.broken}")

    def begin(self) -> None:
        """A backward has begun whose gradients are exchanged."""
        if self.running and self.broken is None:
            self.broken = INTERRUPTED
        self.check_usable()
        assert self.comm is not None
        self.watch.begin()
        warn_if_state_missing(self.method, self.state)
        self.starting = self.state.step < self.state.start
        self.loss_scale.begin(self.comm.device)
        self.state.lr = None
        self.running = True

    def finish(self) -> None:
        """Wait for all programs.

        Raises:
            RuntimeError: one has failed; there will be no other step.
        """
        assert self.comm is not None
        started = time.perf_counter()
        failure = self.comm.steps.finish()
        self.counters.exposed_seconds += time.perf_counter() - started
        if failure:
            self.fail(failure)

    def commit(self, *, used: bool = True) -> None:
        """Keep what the programs have staged, if every verdict holds.

        Args:
            used: whether an optimizer's step is to be awaited; False: the gradients count as used.
        """
        assert self.comm is not None
        hold = used and self.watch.hold
        if self.comm.device.type == "cuda":
            self.state.end_step_on_device(hold=hold)
        elif not self.state.end_step(hold=hold):
            self.counters.rejected += 1
        self.watch.delivered()
        self.running = False

    def abandon(self) -> None:
        """The backward has died, and with it the gradients: forget what its programs have staged."""
        self.running = False
        self.state.drop_step()

    def give_up(self, text: str) -> None:
        """There will be no other step."""
        self.broken = text
        self.abandon()

    def fail(self, text: str) -> NoReturn:
        """The same, and raise ``RuntimeError``."""
        self.give_up(text)
        raise RuntimeError(text)

    # --- afterwards ----------------------------------------------------------------------------------------------

    def stats(self, note: str, buckets: Sequence[BucketStats] = (), *, rebuilt: bool = False) -> Stats:
        """The counters so far."""
        ledger, counters = Ledger() if self.comm is None else self.comm.ledger, self.counters
        return Stats(
            method=self.method.name,
            note=note,
            world_size=self.state.size,
            rank=self.rank,
            steps=self.state.step,
            rejected_steps=counters.rejected,
            dropped_steps=self.watch.dropped,
            bytes_sent=ledger.total,
            dense_bytes=round(counters.dense_bytes),
            exposed_seconds=counters.exposed_seconds + counters.deferred_seconds,
            deferred_seconds=counters.deferred_seconds,
            rebuilt=rebuilt,
            collectives=dict(ledger.issued),
            bytes_by_kind=dict(ledger.bytes),
            buckets=tuple(buckets),
        )

    def leave(self, error: BaseException | None) -> None:
        """Tell the others, if they come to ask, that this rank closes in the middle of a step, or after an error."""
        if self.running and self.broken is None:
            self.broken = "it was closed in the middle of an exchange"
        if isinstance(self.comm, Communicator) and (self.running or error is not None):
            self.comm.leave(f"has left at step {self.state.step}" + (f" with {in_words(error)}" if error else ""))

    def close(self) -> None:
        """Give the process groups back and watch optimizers no longer. Idempotent."""
        if self.comm is not None:
            self.comm.close(broken=self.broken is not None)
        self.watch.close()
        self.broken = self.broken or "it was closed"
