"""``ddp_hook``: any method as a communication hook of ``DistributedDataParallel``.

DDP chooses the buckets and rebuilds them after the first backward, so all state is kept per parameter. A hook does not
know parameter names: ``float32/0`` is the last registered float32 parameter, ``float32/1`` the one before, and so on.
DDP presents parameters in that order in its first backward, whatever ``bucket_cap_mb`` is.

No ``from __future__ import annotations`` here: DDP compares the hook's annotations with classes and refuses strings.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.adapters.ddp_sync import DDPSync, HookOptions
from thinwire.core.checks import check_count
from thinwire.core.methods.registry import resolve
from thinwire.core.program import Method, Topology
from thinwire.engine.local import Local
from thinwire.engine.local.named import named_local
from thinwire.engine.settings import check_scaler, check_topology, checked_timeout

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket
else:
    GradBucket = getattr(dist, "GradBucket", None)  # a torch built without distributed has none

Hook = Callable[[DDPSync, GradBucket], "torch.futures.Future[Tensor]"]


def ddp_hook(
    method: Method | Local | str,
    *,
    scaler: Any = None,
    start_compression_step: int | None = None,
    timeout: timedelta | float | None = None,
    process_group: dist.ProcessGroup | None = None,
    topology: Topology | None = None,
    **options: Any,
) -> tuple[DDPSync, Hook]:
    """Return state and hook for ``ddp_model.register_comm_hook(*ddp_hook("acp", rank=4))``; one pair per DDP model.

    Args:
        method: a name with its ``options``, or an instance. Buckets are DDP's, so ``fusion`` has no effect: set
            ``bucket_cap_mb``. Here, embeddings cannot be distinguished from other matrices.
        scaler: the GradScaler in use, so that residuals are kept in unscaled units. None: it is detected at its first
            ``scaler.step(optimizer)``.
        start_compression_step: as in :func:`thinwire.attach`.
        timeout: seconds (or a timedelta) after which a silent rank is an error; None: that of torch's process groups.
        process_group: the group that was passed to DDP; None: the default one.
        topology: which rank sits on which machine; None: from torchrun's LOCAL_WORLD_SIZE.

    Raises:
        ValueError: the method's name or an option is unknown or out of range, its schedule is decoupled, or it is
            local steps.
    """
    if (local := named_local(method, options)) is not None:
        raise ValueError(
            "local steps exchange weights, but DDP gives its hook gradients: leave out DistributedDataParallel and "
            f"attach to the bare model, thinwire.attach(model, optimizer, {local!r})"
        )
    assert not isinstance(method, Local)
    chosen = resolve(method, **options)
    if chosen.decoupled:
        raise ValueError(
            f"{chosen.name} leaves part of its exchange to the next forward, but DDP wants all gradients at the end "
            "of backward: use thinwire.attach, or a method without decoupled=True"
        )
    limit = checked_timeout(timeout)
    check_scaler(scaler)
    check_topology(topology)
    if start_compression_step is not None:
        check_count("start_compression_step", start_compression_step, 0)
    return DDPSync(chosen, HookOptions(scaler, start_compression_step, limit, process_group, topology)), thinwire_hook


def thinwire_hook(state: DDPSync, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Run the hook of :func:`ddp_hook`; at module level, so that DDP models can be pickled with it."""
    return state.exchange(bucket)
