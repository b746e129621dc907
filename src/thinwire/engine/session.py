"""The steps of an exchange: what ``attach``, DDP's hook and FSDP2's replicas have in common.

No hooks and no autograd: a source of gradients says when a bucket is ready, and puts its average where it belongs.

begin     settle what the last step left; find out the loss scale and the method of this step
open      the executor takes the buckets' programs, and runs those that the source reports as ready
finish    all programs have ended, or one sentence says which failed, and which ranks were late
commit    what the programs have staged takes effect, or is pending until an optimizer has used the gradients

A method with residuals holds a part of each gradient back. If the gradient is used, that part stays in the residual. If
the gradient is dropped (``zero_grad`` without a step: a GAN's pass through the other network, a skipped batch, a probe
of a line search), the part is dropped too. So what a backward leaves is pending until an optimizer steps, and dropped
if another backward comes first.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from thinwire.core.collectives.exchange import ByteCounter, long_wire
from thinwire.core.methods.start import exact_method, start_method
from thinwire.core.program import Method, Scope, State, Topology
from thinwire.engine.executors.events import Failure, MakeProgram
from thinwire.engine.ranks.communicator import Communicator, Names, SingleRank
from thinwire.engine.ranks.late_ranks import in_words
from thinwire.engine.state.scaler import loss_scale, unscale_state
from thinwire.engine.stats import BucketStats, Stats

INTERRUPTED = "an earlier backward ended with an exception in the middle of the exchange"
_PATIENCE = 3
_FRAMES = 16  # the most frames between a hook and the script, with a wrapper or two
logger = logging.getLogger("thinwire")


class Session:
    """The session of one handle. ``start``: number of exact steps before the method begins; None: as it says."""

    def __init__(
        self,
        method: Method,
        comm: Communicator,
        state: State,
        scaler: Any,
        names: Mapping[int, str],
        *,
        start: int | None = None,
        named: Method | None = None,
        expected: bool = False,
    ) -> None:
        # ``named``: whose state is saved, if another runs in its place: on one rank, or while "auto" measures.
        self.named, self.comm, self.state, self.scaler = named or method, comm, state, scaler
        self.dense = exact_method(method)  # for parameters that are not compressed
        self.run_as(method, start)
        self.starting = self.running = False
        self.broken: str | None = None  # why no further step is possible
        self.scale: Tensor | None = None  # the loss scale in this step's gradients, 0-dim
        self.rejected, self.dense_bytes, self.exposed_seconds, self.deferred_seconds = 0, 0.0, 0.0, 0.0
        self._opened: tuple[int, Names] = (0, ())
        self.watch = OptimizerObserver(state, names, expected=expected)
        self.watch.listen(self.find_scaler)

    def run_as(self, method: Method, start: int | None) -> None:
        self.method, self.first = method, start_method(method, self.state.topology, start)
        self.state.start = method.start_steps if start is None else start

    def fit(self) -> None:
        """Run the method as these ranks' processors need it. All ranks must call it, once they agree on the method."""
        found = self.comm.fit(self.method)
        if self.named is self.method:
            self.named = found
        self.method = found

    @property
    def topology(self) -> Topology:
        return self.state.topology

    @property
    def rank(self) -> int:
        return self.state.rank

    def facts(self) -> dict[str, Any]:
        options = {key: str(value) for key, value in self.method.options().items()}
        start = {"start_compression_step": self.state.start, "starts as": self.first.name}
        scaled = {"enabled scaler": self.scaler is not None and self.scaler.is_enabled()}
        return {"method": self.method.name, "options": options} | start | scaled

    def method_of(self, dense: bool) -> Method:
        return self.dense if dense else self.first if self.starting else self.method

    def find_scaler(self, optimizer: torch.optim.Optimizer) -> None:
        if self.scaler is not None or not self.method.has_residual or len(self.comm.ranks) == 1:
            return
        if owned(optimizer, self.watch.names) and (found := _calling_scaler()) is not None:
            self.scaler = found
            unscale_state(found, self.state, self.comm.device)

    def averaged(self, nbytes: int) -> None:
        """Count gradients of that many bytes as averaged, at what S-SGD would have sent for them."""
        ranks = self.state.size
        self.dense_bytes += 2 * (ranks - 1) * nbytes / ranks

    def check_usable(self) -> None:
        if self.broken is not None:
            raise RuntimeError(f"the exchange is unusable after an earlier failure: {self.broken}")

    def begin(self) -> None:
        if self.running and self.broken is None:
            self.broken = INTERRUPTED
        self.check_usable()
        self.watch.begin()
        warn_if_state_missing(self.method, self.state)
        self.starting = self.state.step < self.state.start
        self.scale = None if self.scaler is None else loss_scale(self.scaler, self.comm.device)
        self.state.lr = None
        self.running = True

    def open(
        self, names: Names, make: MakeProgram, failed: Callable[[], None] | None = None, *, pause: bool = False
    ) -> None:
        """Open a step: ``make(i)`` returns the program of ``names[i]``; with ``failed``, ``names`` grow meanwhile."""
        self._opened = self.state.step, names
        self.comm.executor.begin(None if failed else len(names), make, failed, pause=pause)

    def finish(self) -> None:
        """Wait for all programs. ``RuntimeError``: one has failed, and no further step is possible."""
        started = time.perf_counter()
        failure = self.comm.executor.finish()
        self.exposed_seconds += time.perf_counter() - started
        if failure:
            self.fail(self.sentence(failure))

    def wait(self, bucket: int) -> None:
        """Wait for the rest of a paused program that was resumed; else as ``finish``."""
        started = time.perf_counter()
        failure = self.comm.executor.wait(bucket)
        self.deferred_seconds += time.perf_counter() - started
        if failure:
            self.fail(self.sentence(failure))

    def sentence(self, failure: Failure) -> str:
        return self.comm.sentence(failure, *self._opened)

    def commit(self, *, used: bool = True) -> None:
        """Keep what the programs have staged, if all was finite. Not ``used``: an optimizer's step is not awaited."""
        hold = used and self.watch.hold
        if self.comm.device.type == "cuda":
            self.state.end_step_on_device(hold=hold)
        elif not self.state.end_step(hold=hold):
            self.rejected += 1
        self.watch.fresh = True
        self.running = False

    def abandon(self) -> None:
        """Drop what the programs have staged: the backward ended early, and its gradients are lost."""
        self.running = False
        self.state.drop_step()

    def give_up(self, text: str) -> None:
        self.broken = text
        self.abandon()

    def fail(self, text: str) -> NoReturn:
        """End the exchange for good, with the reason, and raise it as a ``RuntimeError``."""
        self.give_up(text)
        raise RuntimeError(text)

    def stats(self, note: str, buckets: Sequence[BucketStats] = (), *, rebuilt: bool = False) -> Stats:
        ledger = self.comm.ledger
        return Stats(
            method=self.method.name,
            note=note,
            world_size=self.state.size,
            rank=self.rank,
            steps=self.state.step,
            rejected_steps=self.rejected,
            dropped_steps=self.watch.dropped,
            bytes_sent=ledger.total,
            dense_bytes=round(self.dense_bytes),
            exposed_seconds=self.exposed_seconds + self.deferred_seconds,
            deferred_seconds=self.deferred_seconds,
            rebuilt=rebuilt,
            collectives=dict(ledger.issued),
            bytes_by_kind=dict(ledger.bytes),
            buckets=tuple(buckets),
            wire=long_wire(self.comm.ranks),
        )

    def leave(self, error: BaseException | None) -> None:
        """Leave word for other ranks that this rank closes in the middle of a step, or after an error."""
        if self.running and self.broken is None:
            self.broken = "it was closed in the middle of an exchange"
        if self.running or error is not None:
            self.comm.leave(f"has left at step {self.state.step}" + (f" with {in_words(error)}" if error else ""))

    def close(self) -> None:
        """Give the process groups back and stop watching optimizers. Idempotent."""
        self.comm.close(broken=self.broken is not None)
        self.watch.close()
        self.broken = self.broken or "it was closed"


def _calling_scaler() -> Any:
    """Find the scaler that calls ``step`` on the stack: torch has no public call for it."""
    frame = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame.f_back is None:
            return None
        frame = frame.f_back
        # Only there: before Python 3.13, ``f_locals`` leaves a copy that keeps a loop's outputs and models alive.
        if frame.f_code.co_name == "step" and isinstance(found := frame.f_locals.get("self"), torch.amp.GradScaler):
            return found
    return None


def restarts() -> int:
    """Return how often torchrun has restarted the ranks of this job; 0 without torchrun."""
    text = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(text) if text.isdecimal() else 0


def warn_if_state_missing(method: Method, state: State) -> None:
    """Warn, at a first step, if this is a restarted job that has not loaded its residuals."""
    if state.step == 0 and not state.restored and method.has_residual and state.rank == 0 and (count := restarts()):
        logger.warning(
            "thinwire: restart %d of this job has loaded no state, so the residuals of %s begin at zero and the update "
            "still owed to the model is lost; call thinwire.checkpoint.load, or load_state_dict, before the first step",
            count, method.name,
        )  # fmt: skip


class OptimizerObserver:
    """Detects when gradients have been used, by watching every optimizer that owns some of a model's parameters."""

    _before: weakref.WeakMethod[Callable[[torch.optim.Optimizer], None]]
    _after: weakref.WeakMethod[Callable[[torch.optim.Optimizer], None]] | None

    def __init__(self, state: State, names: Mapping[int, str], *, expected: bool) -> None:
        self._state, self.names, self._expected = state, names, expected
        self._seen = self._told = False
        self.fresh = False  # ``.grad`` holds averages that no optimizer has used
        self._used: set[str] = set()
        self._stepping: weakref.ref[torch.optim.Optimizer] | None = None  # whose step may call a closure
        self.dropped = 0  # backwards
        self.idle: set[str] = set()  # used by this rank not at all: if ``.grad`` stays zero, by no rank
        self._handles = [
            register_optimizer_step_pre_hook(_weakly(self._step_begins)),
            register_optimizer_step_post_hook(_weakly(self._step_ended)),
        ]

    def listen(
        self,
        before: Callable[[torch.optim.Optimizer], None],
        after: Callable[[torch.optim.Optimizer], None] | None = None,
    ) -> None:
        self._before = weakref.WeakMethod(before)
        self._after = None if after is None else weakref.WeakMethod(after)

    @property
    def hold(self) -> bool:
        """Whether what a backward leaves must wait for an optimizer's step to take effect."""
        return self._seen or self._stepping is not None or (self._expected and self.dropped < _PATIENCE)

    def begin(self) -> None:
        state = self._state
        again, self.fresh = self.fresh, False
        self._used.clear()  # left by a step that raised
        stepping = None if self._stepping is None else self._stepping()
        if state.pending and stepping is not None and _uses_all(stepping):
            names = self.names  # whether zero_grad has been called or not
            state.commit({names[id(p)] for group in stepping.param_groups for p in group["params"] if id(p) in names})
        if state.pending:
            state.drop_pending()
            self.dropped += 1
            if self.dropped == _PATIENCE and not self._seen and stepping is None and state.rank == 0:
                logger.warning(
                    "thinwire: %d backwards, but no optimizer that owns these parameters has stepped: from now on all "
                    "gradients count as used (attach with optimizer=None if the script updates weights by itself)",
                    _PATIENCE,
                )
        if again and self._seen and not self._told and stepping is None and state.rank == 0:
            self._told = True
            logger.info(
                "thinwire: gradients were exchanged twice before optimizer.step(). If they add up, wrap all "
                "backwards but the last in `with sync.no_sync():`; if zero_grad() drops those of one, wrap that one"
            )

    def _step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        if (before := self._before()) is not None:
            before(optimizer)
        self._stepping = weakref.ref(optimizer) if owned(optimizer, self.names) else None
        if self._state.pending:
            self._used |= self._with_gradient(optimizer)

    def _step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        if self._after is not None and (after := self._after()) is not None:
            after(optimizer)
        if not owned(optimizer, self.names):
            return
        self._seen, self.fresh, self._stepping = True, False, None
        if self._state.pending:  # a closure may have made gradients meanwhile
            self._state.commit(self._used | self._with_gradient(optimizer))
        self._used.clear()

    def _with_gradient(self, optimizer: torch.optim.Optimizer) -> set[str]:
        names = self.names
        held = (p for group in optimizer.param_groups for p in group["params"] if id(p) in names)
        used = ((names[id(p)], p.grad) for p in held if p.requires_grad and p.grad is not None)
        return {name for name, grad in used if name not in self.idle or bool(grad.any())}

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _uses_all(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether every gradient of a closure moves the parameters: LBFGS's, unless it searches along a line."""
    searches = any(group.get("line_search_fn") for group in optimizer.param_groups)
    return isinstance(optimizer, torch.optim.LBFGS) and not searches


def owned(optimizer: torch.optim.Optimizer, names: Container[int]) -> bool:
    return any(id(p) in names for group in optimizer.param_groups for p in group["params"])


def _weakly(method: Callable[[torch.optim.Optimizer], None]) -> Any:
    reference = weakref.WeakMethod(method)

    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if (found := reference()) is not None:
            found(optimizer)

    return hook


class Channel:
    """Runs programs besides training, on lanes of its own. Made by ``Services.channel`` on all ranks.

    ``Services.run`` blocks; a channel does not. Its programs run in the order of their numbers; neither they nor the
    gradients' wait for the others' turn. ``session``: None: one rank; else a failure here ends it.
    """

    def __init__(self, session: Session | None, topology: Topology, purpose: str, depth: Mapping[Scope, int]) -> None:
        self._session, self._comm = session, SingleRank() if session is None else session.comm
        self.topology, self.ledger, self.rank = topology, ByteCounter(), self._comm.rank
        self._executor, self._release = self._comm.executor_beside(purpose, depth, topology, self.ledger)
        self._opened: tuple[int, Names] = (0, ())
        self._broken = False
        self.under_way = False  # a round has begun and has not been waited for

    def begin(self, names: Names, make: MakeProgram) -> None:
        """Open a round of ``len(names)`` programs, once the last has been waited for; ``make(i)`` returns the i-th."""
        if self.under_way:
            raise RuntimeError("a channel's round begins when the one before has ended: call wait() first")
        self.under_way = bool(names)
        if names:
            self._opened = 0 if self._session is None else self._session.state.step, names
            self._executor.begin(len(names), make)

    def ready(self, index: int, *, inline: bool = True) -> None:
        """Say, in any order, that a program's data are there; ``inline``: it may run here, with its one exchange."""
        self._executor.ready(index, inline=inline)

    def wait(self) -> float:
        """Wait until the round has ended. Return the seconds that this took. A failure ends the session."""
        if not self.under_way:
            return 0.0
        self.under_way = False
        started = time.perf_counter()
        if failure := self._executor.finish():
            self._broken = True
            assert self._session is not None  # one rank does not fail
            self._session.fail(self._comm.sentence(failure, *self._opened))
        return time.perf_counter() - started

    def close(self, *, broken: bool = False) -> None:
        """Stop the executor and give the process groups back. Idempotent."""
        release, self._release = self._release, lambda broken: None
        self._executor.close()
        release(broken=broken or self._broken or self.under_way)
