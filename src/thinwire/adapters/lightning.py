"""Lightning: ``Trainer(strategy="ddp", callbacks=[ThinwireCallback("acp", rank=4)])``.

``DDPStrategy(ddp_comm_hook=...)`` registers its hook on CUDA devices only, and silently drops it elsewhere. This
callback registers on any device, once the strategy has wrapped the model.
"""

from __future__ import annotations

import importlib
import logging
import sys
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

from thinwire.adapters.ddp import DDPSync
from thinwire.adapters.ddp_module import chosen
from thinwire.adapters.local_ddp import LocalRank, Rank, connect, gathered_state
from thinwire.core.program import Method, Topology
from thinwire.engine.local import Local
from thinwire.engine.local.sync import LocalSync

log = logging.getLogger("thinwire")


def _callback_class() -> Any:
    """Return Lightning's ``Callback``, from the package that the script has already imported, if any."""
    names = sorted(("lightning.pytorch", "pytorch_lightning"), key=lambda name: name not in sys.modules)
    for name in names:
        try:
            return importlib.import_module(name).Callback
        except ModuleNotFoundError as error:
            if error.name is None or error.name.split(".")[0] != name.split(".")[0]:
                raise
    raise ImportError("thinwire.adapters.lightning is for Lightning: pip install 'thinwire[lightning]'")


_Callback = _callback_class()


def _of_outer(local: LocalRank, update: Callable[[Any], None], model: Any) -> None:
    with local.outer():
        update(model)


class ThinwireCallback(_Callback):  # type: ignore[misc, valid-type]
    """Exchange the gradients of ``Trainer.fit`` by a thinwire method. On one rank nothing is exchanged.

    Clipping, accumulation and mixed precision are Lightning's, as with plain DDP. Lightning's checkpoints contain the
    residuals of every rank, which are sent to rank 0 for that.

    With local steps they contain the outer weights, and for the callback every rank's own model and optimizer.
    Validation uses the outer weights, and when ``fit`` ends all ranks have the same weights.

    Args:
        method: a name with its ``options``, or an instance. Buckets are DDP's: ``DDPStrategy(bucket_cap_mb=...)``.
            "local", "diloco" or ``thinwire.Local(...)``: DDP averages no gradients, and weights are averaged after some
            of the optimizer's steps.
        start_compression_step: exact steps before a lossy method begins, as in :func:`thinwire.attach`.
        timeout: seconds (or a timedelta) after which a silent rank is an error; None: that of torch's process groups.

    Attributes:
        sync: the hook's state after the start of ``fit``: ``sync.stats()``. For local steps, what
            :func:`thinwire.attach` returns.

    Raises:
        ValueError: the method's name or an option is unknown or out of range, or its schedule is decoupled.
    """

    def __init__(
        self,
        method: Method | Local | str,
        *,
        start_compression_step: int | None = None,
        timeout: timedelta | float | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._method = chosen(method, **options)
        self._given: dict[str, Any] = {"start_compression_step": start_compression_step, "timeout": timeout}
        self.sync: DDPSync | LocalSync | None = None
        self._rank: Rank | None = None
        self._running = self._failed = False
        self._saved: Mapping[str, Any] | None = None
        self._model: weakref.ref[Any] | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Register the hook, or attach: the strategy has just made its DDP module."""
        strategy = trainer.strategy
        if getattr(strategy, "_ddp_comm_hook", None) is not None:
            fate = "drops" if strategy.root_device.type != "cuda" else "has registered"
            raise ValueError(
                f"the strategy was given ddp_comm_hook=, which it {fate} on {strategy.root_device.type}, and DDP "
                "accepts one hook: leave out ddp_comm_hook, ddp_comm_state and ddp_comm_wrapper, or ThinwireCallback"
            )
        world, here = trainer.world_size, trainer.num_devices
        topology = Topology(world, here) if world % here == 0 else None
        self._given |= {"framework": "Lightning", "world_size": world, "topology": topology}
        self._running, self._failed = True, False
        same = self._model is not None and self._model() is pl_module
        if self._saved is None and same and isinstance(self.sync, DDPSync):
            self._saved = self.sync.state_dict()  # fit continues, with a new DDP module
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._rank = connect(strategy.model, self._method, trainer.optimizers, scaler=scaler, **self._given)
        self.sync, self._model = self._rank.sync, weakref.ref(pl_module)
        if isinstance(self._rank, LocalRank):
            self._meet(trainer, self._rank)

    def _meet(self, trainer: Any, rank: LocalRank) -> None:
        """With local steps, let Lightning's averages follow the outer weights, and finish after all who write weights.

        Raises:
            ValueError: a callback averages this rank's own weights in a way of its own.
        """
        callbacks = sys.modules[_Callback.__module__.rpartition(".")[0]]
        for one in trainer.callbacks:
            if isinstance(one, callbacks.StochasticWeightAveraging):
                raise ValueError(
                    "StochasticWeightAveraging averages each rank's own weights, which local steps do not keep equal: "
                    "use lightning.pytorch.callbacks.WeightAveraging, which then averages the outer weights"
                )
            if (averaging := getattr(callbacks, "WeightAveraging", None)) and isinstance(one, averaging):
                average: Any = one._average_model
                average.update_parameters = partial(_of_outer, rank, average.update_parameters)
        others = [one for one in trainer.callbacks if one is not self]
        place = sum(not isinstance(one, callbacks.Checkpoint) for one in others)  # Lightning puts these last
        trainer.callbacks = [*others[:place], self, *others[place:]]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Load this rank's part of a checkpoint, after Lightning has given all ranks rank 0's optimizer state."""
        assert self._rank is not None
        if self._saved:
            self._rank.load_state_dict(self._saved)
        elif trainer.ckpt_path and isinstance(self._method, Method) and self._method.has_residual:
            log.warning("thinwire: %s holds no state of ThinwireCallback: residuals begin at zero", trainer.ckpt_path)
        self._saved = None

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self._rank is not None and self._running:
            self._rank.lend()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._rank is not None:
            self._rank.take_back()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._rank is not None:
            self._rank.finish()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if isinstance(self._rank, LocalRank) and self._running and not self._failed:
            with self._rank.outer():
                outer = trainer.strategy.lightning_module_state_dict()
                place = "current_model_state" if "current_model_state" in checkpoint else "state_dict"
                checkpoint[place] = {key: value.clone() for key, value in outer.items()}

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """End the communicator thread; the state is kept, for another ``fit`` or ``save_checkpoint``."""
        if self._running and self.sync is not None:
            self.sync.close()
        self._running = False

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._failed = True  # other ranks may no longer be there

    def state_dict(self) -> dict[str, Any]:
        """Return all ranks' states on rank 0, and this rank's elsewhere. Lightning calls it on all ranks."""
        if self._rank is None:
            return dict(self._saved or {})
        if self._failed:
            log.warning("thinwire: a checkpoint after an exception holds no residuals: other ranks may be gone")
            return {}
        self._rank.take_back()  # saved during validation: what follows must see this rank's own
        return gathered_state(self._rank)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep a state until ``fit`` starts, since there is no DDP module before; during ``fit``, load it."""
        if self._running and self._rank is not None:
            self._rank.load_state_dict(state_dict)
        else:
            self._saved = dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        """Support strategies that start processes: the method is sent along, this process's own objects are not."""
        return {**self.__dict__, "sync": None, "_rank": None, "_model": None, "_running": False}
