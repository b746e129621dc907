"""``ddp_hook``: any method as a communication hook of ``DistributedDataParallel``.

DDP decides the buckets and rebuilds them after the first backward, so everything is kept per parameter. A hook never
learns parameter names: ``float32/0`` is the last registered float32 parameter, ``float32/1`` the one before, and so on.
That is the order in which DDP presents them in its first backward whatever ``bucket_cap_mb`` is.

No ``from __future__ import annotations`` here: DDP compares the hook's annotations with classes and refuses strings.
"""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.adapters.ddp_group import any_rank
from thinwire.adapters.ddp_names import Ordinals
from thinwire.adapters.ddp_persistence import from_state_dict, to_state_dict
from thinwire.adapters.ddp_steps import DDPSteps
from thinwire.engine.parameters import managed_parameters
from thinwire.engine.persistence import check_scaled, scaled
from thinwire.engine.settings import check_scaler, check_topology, checked_timeout
from thinwire.engine.stats import BucketStats, Stats
from thinwire.methods.base import check_count
from thinwire.methods.registry import resolve
from thinwire.program import Method, State, Topology

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket
else:
    GradBucket = getattr(dist, "GradBucket", None)  # a torch built without distributed has none

Hook = Callable[["DDPSync", GradBucket], "torch.futures.Future[Tensor]"]


def ddp_hook(
    method: Method | str,
    *,
    scaler: Any = None,
    start_compression_step: int | None = None,
    timeout: timedelta | float | None = None,
    group: dist.ProcessGroup | None = None,
    topology: Topology | None = None,
    **options: Any,
) -> tuple["DDPSync", Hook]:
    """State and hook for ``ddp_model.register_comm_hook(*ddp_hook("acp", rank=4))``; one pair per DDP model.

    Args:
        method: a name with its ``options``, or an instance. Buckets are DDP's, so ``merge`` has no effect: set
            ``bucket_cap_mb``. Embeddings cannot be told from other matrices here.
        scaler: the GradScaler in use, so that residuals are kept in unscaled units. None: it is found at its first
            ``scaler.step(optimizer)``.
        start_compression_step: as of :func:`thinwire.attach`.
        timeout: seconds (or a timedelta) after which a silent rank is an error; None: that of torch's process groups.
        group: the ``process_group`` that was given to DDP; None: the default one.
        topology: which rank sits on which machine; None: from torchrun's LOCAL_WORLD_SIZE.

    Raises:
        ValueError: the method's name or an option is unknown or out of range, or its schedule is decoupled.
    """
    chosen = resolve(method, **options)
    if getattr(chosen, "decoupled", False):
        raise ValueError(
            f"{chosen.name} leaves a part of its exchange to the next forward, but DDP wants all gradients at the end "
            "of backward: use thinwire.attach, or a method without decoupled=True"
        )
    limit = checked_timeout(timeout)
    check_scaler(scaler)
    check_topology(topology)
    if start_compression_step is not None:
        check_count("start_compression_step", start_compression_step)
    return DDPSync(chosen, scaler, start_compression_step, limit, group, topology), thinwire_hook


def thinwire_hook(state: "DDPSync", bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook that :func:`ddp_hook` gives; at the top of a module, so that DDP models can be pickled with it."""
    return state.exchange(bucket)


class DDPSync(DDPSteps):
    """What a DDP communication hook keeps between steps. Made by :func:`ddp_hook`.

    Pickled, inside a DDP model or alone, it takes its method and this rank's state along, but neither the process group
    nor the scaler.

    Its dict is that of ``GradientSync`` (DCP's ``Stateful``), with ordinals for parameter names, or with the model's
    after ``learn_names``.
    """

    def learn_names(self, model: nn.Module) -> None:
        """Use the model's own parameter names, and its modules, as ``attach`` does; before the first backward.

        For callers who hold the model. Seeds, what is left dense, and names in ``state_dict`` are then ``attach``'s.

        Args:
            model: the module inside DDP.

        Raises:
            TypeError: a parameter that thinwire does not exchange: complex, or with sparse gradients.
        """
        managed = managed_parameters(model, self._named, "auto")
        self._ordinals = Ordinals((m.name, m.parameter) for m in managed)
        self._kept = {m.name: m.dense for m in managed}

    def names(self) -> list[tuple[str, Tensor]]:
        """Names and parameters; empty before the first backward, unless ``learn_names`` was called."""
        return self._ordinals.items()

    def stats(self) -> Stats:
        """Counters since the start. DDP waits in C++, so ``exposed_seconds`` is not known here and stays 0."""
        state = self.state
        if self._comm is None:
            return Stats(self.method.name, self._note, state.size, state.step)
        ledger = self._comm.ledger
        phase = state.turn % self.method.phases
        buckets = []
        for names, elements, dense in self._layouts[-1] if self._layouts else ():
            traced = self._traces[names, dense]
            sent = sum(step.sent_bytes for step in traced[phase if not dense else 0])
            buckets.append(BucketStats(names, elements, dense, sent))
        return Stats(
            method=self.method.name,
            note=self._note,
            world_size=state.size,
            steps=state.step,
            rejected_steps=self._rejected,
            dropped_steps=self._watch.dropped,
            bytes_sent=ledger.total,
            dense_bytes=round(self._dense_bytes),
            rebuilt=len(self._layouts) > 1,
            collectives=dict(ledger.issued),
            bytes_by_kind=dict(ledger.bytes),
            buckets=tuple(buckets),
        )

    def agree(self, flag: bool) -> bool:
        """Whether any rank raises the flag; equal on all ranks. Between steps only."""
        return flag if self.state.size == 1 else any_rank(flag, self._group)

    @property
    def group(self) -> dist.ProcessGroup:
        """DDP's process group."""
        found = self._group or dist.group.WORLD
        assert found is not None
        return found

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, flat: residuals under ``residual/<rank>/<name>``. No collective, no side effect."""
        kept = [(name, p) for name, p in self.names() if not self._dense_here(name, p)]
        return to_state_dict(self.state, self._named, kept, self._ordinals.source) | scaled(self._scaler)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a ``state_dict``: bit for bit at the same world size; the mean of the residuals at another.

        A single rank sends everything, so it pays nothing of what was owed: it keeps it, and ``state_dict`` hands it on
        until there are several ranks again.

        Raises:
            ValueError: it is of another method, was not made by this hook, or lacks what this rank needs.
        """
        if self.state.size > 1:
            check_scaled(state, self._scaler)
        from_state_dict(self.state, self._named, state, self._ordinals.source)
        self._ordinals.fit(self.state)

    def __reduce__(self) -> Any:
        saved = self.state_dict() if self._state is not None and self._ordinals.source == "ddp" else self._saved
        return _unpickled, (self._named, self._start, self._timeout, self._given, saved)

    @property
    def state(self) -> State:
        """The method's memory, by ordinal name."""
        made = super().state
        if self._saved is not None:
            saved, self._saved = self._saved, None
            self.load_state_dict(saved)
        return made

    def close(self) -> None:
        """End the communicator thread and give the process groups back; the hook cannot be used afterwards."""
        if self._comm is not None:
            self._comm.close(broken=self._broken is not None)
            self._watch.close()
            self._broken = self._broken or "it was closed"

    def __enter__(self) -> "DDPSync":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _unpickled(
    method: Method,
    start: int | None,
    timeout: timedelta | None,
    topology: Topology | None,
    saved: dict[str, Any] | None,
) -> DDPSync:
    made = DDPSync(method, None, start, timeout, None, topology)
    made._saved = saved
    return made
