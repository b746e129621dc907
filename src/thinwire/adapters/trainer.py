"""Hugging Face's Trainer: ``trainer.add_callback(ThinwireCallback(trainer, "acp", rank=4))``.

``TrainingArguments`` cannot pass a hook, and callbacks do not see the DDP module, so this callback is created with the
trainer. It also works for subclasses of ``Trainer``.
"""

from __future__ import annotations

import logging
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire.adapters.ddp import DDPSync
from thinwire.adapters.ddp_module import chosen
from thinwire.adapters.local_ddp import LocalRank, Rank, connect, load_from, save_in
from thinwire.core.program import Method
from thinwire.engine.local import Local
from thinwire.engine.local.sync import LocalSync

try:
    import accelerate  # noqa: F401  # without it, Trainer is a placeholder that says so only when made
    from transformers import TrainerCallback
except ModuleNotFoundError as error:
    if error.name not in ("transformers", "accelerate"):
        raise
    raise ImportError(
        f"thinwire.adapters.trainer is for the Trainer of transformers, and {error.name} is missing: "
        "pip install 'thinwire[accelerate,transformers]'"
    ) from error

log = logging.getLogger("thinwire")


class ThinwireCallback(TrainerCallback):
    """Exchange the gradients of ``trainer.train`` by a thinwire method. On one rank nothing is exchanged.

    Clipping, accumulation and mixed precision are the Trainer's, as with plain DDP. Each checkpoint folder gets one
    file per rank next to the Trainer's own files, and ``resume_from_checkpoint`` loads them.

    With local steps, these files also contain each rank's model and optimizer, and the Trainer's own the outer weights.
    Evaluation uses the outer weights too, and when ``train`` ends all ranks have the same weights.

    Args:
        trainer: the trainer to which the callback is added.
        method: a name with its ``options``, or an instance. Buckets are DDP's:
            ``TrainingArguments(ddp_bucket_cap_mb=...)``. "local", "diloco" or ``thinwire.Local(...)``: DDP averages no
            gradients, and weights are averaged after some of the optimizer's steps.
        sites: of a model that your script has sharded by ``fully_shard``: the dimension of the mesh between sites, such
            as ``mesh["site"]``; for local steps only, and without the Trainer's own checkpoints.
        start_compression_step: exact steps before a lossy method begins, as in :func:`thinwire.attach`.
        timeout: seconds (or a timedelta) after which a silent rank is an error; None: that of torch's process groups.
        resume_from: the checkpoint from which ``train`` resumes, if it is not one of ``output_dir``; callbacks are not
            told.

    Attributes:
        sync: the hook's state after the start of training: ``sync.stats()``. For local steps, what
            :func:`thinwire.attach` returns.

    Raises:
        ValueError: the method's name or an option is unknown or out of range, or its schedule is decoupled.
    """

    def __init__(
        self,
        trainer: Any,
        method: Method | Local | str,
        *,
        sites: Any = None,
        start_compression_step: int | None = None,
        timeout: timedelta | float | None = None,
        resume_from: str | None = None,
        **options: Any,
    ) -> None:
        if not hasattr(trainer, "model_wrapped"):
            raise TypeError(f"ThinwireCallback takes the Trainer first, not {type(trainer).__name__}")
        self._trainer, self._resume_from = trainer, resume_from
        self._given: dict[str, Any] = {"start_compression_step": start_compression_step, "timeout": timeout}
        self._method, self._sites = chosen(method, **options), sites
        if sites is not None and not isinstance(self._method, Local):
            raise ValueError("sites= is for local steps: other methods exchange gradients and do not need it")
        self.sync: DDPSync | LocalSync | None = None
        self._module: Any = None
        self._rank: Rank | None = None
        self._finished = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Register the hook on the model that the Trainer wrapped. A second ``train`` keeps wrapper and hook."""
        module, accelerator = self._trainer.model_wrapped, self._trainer.accelerator
        self._given |= {"framework": "Trainer", "world_size": accelerator.num_processes}
        if self._sites is not None and args.save_strategy != "no":
            raise ValueError(
                'the Trainer\'s checkpoints do not hold what sites continue from: pass save_strategy="no", and save by '
                "callback.sync.save(folder), or a model inside callback.sync.outer_weights()"
            )
        optimizer, self._finished = self._trainer.optimizer, False
        inner = getattr(optimizer, "optimizer", optimizer)
        local = self._rank if isinstance(self._rank, LocalRank) else None
        if module is not self._module or (local is not None and inner not in local.sync.services.optimizers):
            if local is not None:
                local.sync.close()
            given = self._given | {"sites": self._sites, "scaler": accelerator.scaler}
            self._rank, self._module = connect(module, self._method, [optimizer], **given), module
            self.sync = self._rank.sync
        if state.global_step > 0:
            self._resume(args, state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._rank is not None:
            self._rank.take_back()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluate and save the outer weights, which are equal on all ranks."""
        if self._rank is not None and (control.should_evaluate or control.should_save):
            self._whole()
            self._rank.lend()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._rank is not None:
            self._rank.take_back()
            if control.should_training_stop or state.global_step >= state.max_steps:
                self._finish(self._rank)
        self.on_step_end(args, state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End with the same weights on all ranks: those of the last round, or of the best checkpoint if loaded."""
        if self._rank is not None:
            self._rank.take_back()
            if not (self._finished or (args.load_best_model_at_end and state.best_model_checkpoint is not None)):
                self._finish(self._rank)

    def _finish(self, rank: Rank) -> None:
        self._whole()
        rank.finish()
        self._finished = True

    def _whole(self) -> None:
        """Let a schedule-free optimizer hand its weights over; the Trainer takes it back to training at each step."""
        if isinstance(self._rank, LocalRank) and callable(whole := getattr(self._trainer.optimizer, "eval", None)):
            whole()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        weights = _checksum(self._trainer.model)
        if self._rank is None:
            return
        self._rank.take_back()
        if args.save_only_model:
            return
        if state.is_hyper_param_search:
            log.warning("thinwire: checkpoints of a hyper-parameter search hold no residuals")
            return
        save_in(_folder(args, state.global_step), "thinwire", self._rank, weights=weights)

    def _resume(self, args: Any, step: int) -> None:
        assert self._rank is not None
        folder = Path(self._resume_from) if self._resume_from else _folder(args, step)
        if not load_from(folder, "thinwire", self._rank, weights=_checksum(self._trainer.model)) and (
            isinstance(self._method, Local) or self._method.has_residual
        ):
            log.warning(
                "thinwire: training continues at step %d, but %s holds no state of ThinwireCallback: residuals begin "
                "at zero (for a checkpoint elsewhere, pass resume_from=)",
                step, folder,
            )  # fmt: skip


def _folder(args: Any, step: int) -> Path:
    return Path(args.output_dir) / f"checkpoint-{step}"


def _checksum(model: nn.Module) -> int:
    """Checksum the first 4096 elements of each trainable parameter: residuals only fit one step's weights of a run."""
    found = 0
    for parameter in model.parameters():
        if parameter.requires_grad:
            values = parameter.detach().reshape(-1)[:4096].cpu().contiguous()
            found = zlib.crc32(values.view(torch.uint8).numpy().tobytes(), found)
    return found
