"""Accelerate: ``register_comm_hook(accelerator, model, "acp", rank=4)``, after ``accelerator.prepare``.

Accelerate's own handler, ``DistributedDataParallelKwargs(comm_hook=...)``, only accepts five hooks, and ``Accelerator``
refuses a subclass of it. So the hook is registered on what ``prepare`` returns.
"""

from __future__ import annotations

import copy
import logging
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, overload

from torch.optim import Optimizer

from thinwire.adapters.ddp import DDPSync
from thinwire.adapters.ddp_module import chosen
from thinwire.adapters.local_ddp import LocalRank, connect, load_from, save_in
from thinwire.core.program import Method
from thinwire.engine.local import Local
from thinwire.engine.local.sync import LocalSync

try:
    from accelerate import Accelerator
except ModuleNotFoundError as error:
    if error.name != "accelerate":
        raise
    raise ImportError("thinwire.adapters.accelerate is for Accelerate: pip install 'thinwire[accelerate]'") from error

log = logging.getLogger("thinwire")

_registered: weakref.WeakKeyDictionary[Accelerator, int] = weakref.WeakKeyDictionary()


@overload
def register_comm_hook(
    accelerator: Accelerator, model: Any, method: Local | Literal["local", "diloco"], **options: Any
) -> LocalSync: ...


@overload
def register_comm_hook(accelerator: Accelerator, model: Any, method: Method | str, **options: Any) -> DDPSync: ...


def register_comm_hook(
    accelerator: Accelerator,
    model: Any,
    method: Method | Local | str,
    *,
    optimizer: Any = None,
    sites: Any = None,
    start_compression_step: int | None = None,
    timeout: timedelta | float | None = None,
    **options: Any,
) -> DDPSync | LocalSync:
    """Exchange a prepared model's gradients by a thinwire method. On one rank nothing is exchanged.

    All ranks call it, before the first backward. ``accelerator.accumulate``, ``clip_grad_norm_`` and mixed precision
    work as with plain DDP. ``save_state`` and ``load_state``, which all ranks must call, keep one file per rank next to
    Accelerate's own files.

    Args:
        accelerator: the accelerator whose ``prepare`` made the model.
        model: what ``accelerator.prepare`` returned.
        method: a name with its ``options``, or an instance. Buckets are DDP's:
            ``DistributedDataParallelKwargs(bucket_cap_mb=...)``. "local", "diloco" or ``thinwire.Local(...)``: DDP
            averages no gradients, and weights are averaged after some of the optimizer's steps.
        optimizer: what ``prepare`` returned, or a list of several; for local steps only.
        sites: of a model that your script has sharded by ``fully_shard`` before ``prepare``: the dimension of the mesh
            between sites, such as ``mesh["site"]``; for local steps only. State is kept by ``save`` and ``load`` of
            what is returned, not by ``save_state``.
        start_compression_step: exact steps before a lossy method begins, as in :func:`thinwire.attach`.
        timeout: seconds (or a timedelta) after which a silent rank is an error; None: that of torch's process groups.

    Returns:
        The hook's state: ``stats()``, ``state_dict()``; for local steps, what :func:`thinwire.attach` returns, whose
            ``finish()`` must be called after training.

    Raises:
        ValueError: an invalid method or option, or several ranks and a model that is not plain DDP.
        RuntimeError: the model has a hook already.
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"register_comm_hook takes the Accelerator first, not {type(accelerator).__name__}")
    chosen_method = chosen(method, **options)
    local = isinstance(chosen_method, Local)
    if local and optimizer is None:
        raise ValueError(
            "local steps are counted by the optimizer's steps: add optimizer=, as returned by accelerator.prepare"
        )
    if not local and optimizer is not None:
        raise ValueError("optimizer= is for local steps: other methods exchange gradients and do not need it")
    optimizers = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    rank = connect(
        model, chosen_method, optimizers, framework="Accelerate", world_size=accelerator.num_processes,
        scaler=accelerator.scaler, start_compression_step=start_compression_step, timeout=timeout, sites=sites,
    )  # fmt: skip
    if sites is not None:
        return rank.sync
    name = _file_of_next(accelerator)
    again = _Again(rank) if isinstance(rank, LocalRank) else None

    def save(models: Any, weights: Any, output_dir: str) -> None:
        save_in(Path(output_dir), name, rank)
        for one, found in zip(models, weights):
            if isinstance(rank, LocalRank) and (one is model or one is rank.sync.services.model):  # it keeps either
                with rank.outer():
                    outer = accelerator.get_state_dict(one, unwrap=False)
                    found.update({key: value.clone() for key, value in outer.items()})

    def load(models: Any, input_dir: str) -> None:
        if load_from(Path(input_dir), name, rank):
            if again is not None:
                again.expect()
        elif isinstance(chosen_method, Method) and chosen_method.has_residual:
            log.warning("thinwire: %s holds no state of thinwire's hook: residuals begin at zero", input_dir)

    hooks = accelerator.register_save_state_pre_hook(save), accelerator.register_load_state_pre_hook(load)
    if isinstance(rank, LocalRank):
        rank.sync.services.handles.extend(hooks)
    return rank.sync


def _file_of_next(accelerator: Accelerator) -> str:
    count = _registered.get(accelerator, 0)
    _registered[accelerator] = count + 1
    return "thinwire" if count == 0 else f"thinwire_{count}"


class _Again:
    """Restore this rank's state after ``load_state``, which gives each rank rank 0's weights and optimizer state."""

    def __init__(self, rank: LocalRank) -> None:
        self._rank, self._waiting = rank, set[int]()
        self._own: dict[str, Any] = {}
        self._optimizers = rank.sync.services.optimizers
        handles = rank.sync.services.handles
        handles.extend(o.register_load_state_dict_post_hook(self._loaded) for o in self._optimizers)

    def expect(self) -> None:
        self._own, self._waiting = copy.deepcopy(self._rank.own()), {id(o) for o in self._optimizers}

    def _loaded(self, optimizer: Optimizer) -> None:
        if optimizer not in self._optimizers or not self._waiting:
            return
        self._waiting.discard(id(optimizer))
        if not self._waiting:
            own, self._own = self._own, {}
            self._rank.put(own)
