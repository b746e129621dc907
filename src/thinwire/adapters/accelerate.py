"""Accelerate: ``register_comm_hook(accelerator, model, "acp", rank=4)``, after ``accelerator.prepare``.

The handler of Accelerate, ``DistributedDataParallelKwargs(comm_hook=...)``, knows five hooks and takes no other, and a
subclass of it is refused by ``Accelerator``. So the hook is registered on what ``prepare`` returns.
"""

from __future__ import annotations

import logging
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

from thinwire.adapters.ddp_module import checked, register
from thinwire.adapters.ddp_ranks import load_from, save_in
from thinwire.adapters.ddp_sync import DDPSync
from thinwire.program import Method

try:
    from accelerate import Accelerator
except ModuleNotFoundError as error:
    if error.name != "accelerate":
        raise
    raise ImportError("thinwire.adapters.accelerate is for Accelerate: pip install 'thinwire[accelerate]'") from error

log = logging.getLogger("thinwire")

_registered: weakref.WeakKeyDictionary[Accelerator, int] = weakref.WeakKeyDictionary()


def register_comm_hook(
    accelerator: Accelerator,
    model: Any,
    method: Method | str,
    *,
    start_compression_step: int | None = None,
    timeout: timedelta | float | None = None,
    **options: Any,
) -> DDPSync:
    """Exchange a prepared model's gradients by a method of thinwire. On one rank nothing is exchanged.

    All ranks call it, before the first backward. ``accelerator.accumulate``, ``clip_grad_norm_`` and mixed precision
    work as with plain DDP; ``save_state`` and ``load_state``, which all ranks must call, keep a file for each rank
    next to Accelerate's own.

    Args:
        accelerator: whose ``prepare`` made the model.
        model: what ``accelerator.prepare`` returned.
        method: a name with its ``options``, or an instance. Buckets are DDP's:
            ``DistributedDataParallelKwargs(bucket_cap_mb=...)``.
        start_compression_step: steps that are exact before a lossy method begins, as of :func:`thinwire.attach`.
        timeout: seconds (or a timedelta) after which a silent rank is an error; None: that of torch's process groups.

    Returns:
        The hook's state: ``stats()``, ``state_dict()``.

    Raises:
        ValueError: a bad method or option, or the model is not plain DDP, although there are several ranks.
        RuntimeError: the model has a hook already.
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"register_comm_hook takes the Accelerator first, not {type(accelerator).__name__}")
    chosen = checked(method, **options)
    sync = register(
        model,
        chosen,
        framework="Accelerate",
        world_size=accelerator.num_processes,
        scaler=accelerator.scaler,
        start_compression_step=start_compression_step,
        timeout=timeout,
    )
    count = _registered.get(accelerator, 0)
    _registered[accelerator] = count + 1
    name = "thinwire" if count == 0 else f"thinwire_{count}"

    def save(models: Any, weights: Any, output_dir: str) -> None:
        save_in(Path(output_dir), name, sync)

    def load(models: Any, input_dir: str) -> None:
        if not load_from(Path(input_dir), name, sync) and chosen.has_residual:
            log.warning("thinwire: %s holds no state of thinwire's hook: residuals begin at zero", input_dir)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return sync
