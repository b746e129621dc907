"""The steps of an exchange: what ``attach``, DDP's hook and FSDP2's replicas have in common.

No hooks and no autograd: a source of gradients says when a bucket is ready, and puts its average where it belongs.

begin     settle what the last step left; find out the loss scale and the method of this step
run       done by the source: the executor runs the buckets' programs
finish    all programs have ended, or one sentence says which failed, and which ranks were late
commit    what the programs have staged takes effect, or is pending until an optimizer has used the gradients
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from thinwire.core.collectives.exchange import Ledger
from thinwire.core.methods.start import exact_method, start_method
from thinwire.core.program import Method, State, Topology
from thinwire.engine.ranks.communicator import Alone, Communicator
from thinwire.engine.ranks.late_ranks import in_words
from thinwire.engine.state.restart import warn_if_state_missing
from thinwire.engine.state.scaler import LossScale
from thinwire.engine.state.step_watch import StepWatch, owned
from thinwire.engine.stats import BucketStats, Stats

INTERRUPTED = "an earlier backward ended with an exception in the middle of the exchange"


@dataclass
class Counters:
    """Totals over steps; see :class:`~thinwire.engine.stats.Stats`."""

    rejected: int = 0
    dense_bytes: float = 0.0
    exposed_seconds: float = 0.0
    deferred_seconds: float = 0.0

    def sent(self, nbytes: int, ranks: int) -> None:
        """Count gradients of that many bytes as averaged, at what S-SGD would have sent for them."""
        self.dense_bytes += 2 * (ranks - 1) * nbytes / ranks


class Session:
    """The session of one handle that a user holds.

    Args:
        method: the method that runs.
        comm: of the ranks; None: nothing is exchanged, or not yet.
        state: of the method.
        scaler: the GradScaler in use; None: found at its first ``scaler.step(optimizer)``.
        names: of the parameters, by ``id``.
        start: number of exact steps before the method begins; None: as the method says.
        named: the method whose state is saved, if another one runs in its place: on one rank, or while "auto" measures.
        expected: whether an optimizer was named, so that its steps will come.
        before_step: called with each optimizer that is about to step; None: ``find_scaler``.
        after_step: called with each optimizer that has stepped; None: nothing.

    Attributes:
        dense: the method for parameters that are not compressed.
        first: the method of the steps before it begins.
        starting: whether the method has not begun, so that ``first`` runs in its place.
        running: whether a step is under way.
        broken: why no further step is possible; None: it is possible.
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
        after_step: Callable[[torch.optim.Optimizer], None] | None = None,
    ) -> None:
        self.named, self.comm, self.state = named or method, comm, state
        self.dense = exact_method(method)
        self.run_as(method, start)
        self.starting = self.running = False
        self.broken: str | None = None
        self.loss_scale = LossScale(scaler)
        self.counters = Counters()
        before = before_step or self.find_scaler
        self.watch = StepWatch(state, names, expected=expected, before=before, after=after_step)

    def run_as(self, method: Method, start: int | None) -> None:
        """Run a method from the next step on; ``start``: see the class."""
        self.method, self.first = method, start_method(method, self.state.topology, start)
        self.state.start = method.start_steps if start is None else start

    def fit(self) -> None:
        """Run the method as these ranks' processors need it. All ranks must call it, once they agree on the method."""
        assert self.comm is not None
        found = self.comm.fit(self.method)
        if self.named is self.method:
            self.named = found
        self.method = found

    @property
    def topology(self) -> Topology:
        """Which rank is on which machine."""
        return self.state.topology

    @property
    def rank(self) -> int:
        return self.state.rank

    def facts(self) -> dict[str, Any]:
        """Return the facts that must be equal on all ranks."""
        options = {key: str(value) for key, value in self.method.options().items()}
        start = {"start_compression_step": self.state.start, "starts as": self.first.name}
        return {"method": self.method.name, "options": options} | start

    def method_of(self, dense: bool) -> Method:
        """Return the method that runs in this step for parameters that are ``dense`` or not."""
        return self.dense if dense else self.first if self.starting else self.method

    def find_scaler(self, optimizer: torch.optim.Optimizer) -> None:
        """Look for a GradScaler that nobody has named, when an optimizer is about to step: it may be the caller."""
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
        """Begin a step, when a backward has begun whose gradients are exchanged."""
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
            RuntimeError: a program has failed; no further step is possible.
        """
        assert self.comm is not None
        started = time.perf_counter()
        failure = self.comm.steps.finish()
        self.counters.exposed_seconds += time.perf_counter() - started
        if failure:
            self.fail(failure)

    def commit(self, *, used: bool = True) -> None:
        """Keep what the programs have staged, if everything was finite.

        Args:
            used: whether to wait for an optimizer's step; False: the gradients count as used.
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
        """Drop what the programs have staged: the backward ended early, and its gradients are lost."""
        self.running = False
        self.state.drop_step()

    def give_up(self, text: str) -> None:
        """End the exchange for good, with the reason."""
        self.broken = text
        self.abandon()

    def fail(self, text: str) -> NoReturn:
        """End the exchange for good, and raise ``RuntimeError``."""
        self.give_up(text)
        raise RuntimeError(text)

    # --- afterwards ----------------------------------------------------------------------------------------------

    def stats(self, note: str, buckets: Sequence[BucketStats] = (), *, rebuilt: bool = False) -> Stats:
        """Return the counters so far."""
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
        """Leave word for other ranks that this rank closes in the middle of a step, or after an error."""
        if self.running and self.broken is None:
            self.broken = "it was closed in the middle of an exchange"
        if isinstance(self.comm, Communicator) and (self.running or error is not None):
            self.comm.leave(f"has left at step {self.state.step}" + (f" with {in_words(error)}" if error else ""))

    def close(self) -> None:
        """Give the process groups back and stop watching optimizers. Idempotent."""
        if self.comm is not None:
            self.comm.close(broken=self.broken is not None)
        self.watch.close()
        self.broken = self.broken or "it was closed"
