"""What a framework's loop and checkpoints see of a rank, whatever the method: gradients by DDP's hook, or local steps.

Local steps run on a model that the framework has wrapped in DDP, which then averages no gradients, or that is sharded.

Two things keep DDP from averaging: it is told not to synchronize, which costs nothing; and if a framework tells it to
again (Lightning does, with manual optimization), a communication hook leaves each rank its own gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from thinwire.adapters.ddp import DDPSync, any_rank, promise_on
from thinwire.adapters.ddp_module import ddp_of, inside, no_ddp, register, register_hook
from thinwire.adapters.fsdp2 import attach as attach_shards
from thinwire.core.durable import readable
from thinwire.core.program import Method, State, Topology
from thinwire.core.program.ops import in_own_modes
from thinwire.engine.attach import attach
from thinwire.engine.local.settings import Local
from thinwire.engine.local.sync import LocalSync
from thinwire.engine.services import fitting

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket


class OwnGradients:
    """Hook state of a DDP module, which accepts only one hook in its life. Not ``kept``: averaged as without a hook."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.kept = group, False


_hooked: weakref.WeakKeyDictionary[DistributedDataParallel, OwnGradients] = weakref.WeakKeyDictionary()


def own_gradients(state: OwnGradients, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    if not state.kept:
        return allreduce_hook(state.group, bucket)
    done = promise_on(bucket.buffer().device)
    done.set_result(bucket.buffer())
    return done


own_gradients.__annotations__.clear()  # DDP compares them with classes, and refuses strings
own_gradients.keeps_own = True  # type: ignore[attr-defined]


class _Apart:
    """Keeps DDP from averaging gradients until ``remove``."""

    def __init__(self, ddp: DistributedDataParallel, framework: str) -> None:
        if ddp not in _hooked:
            state = OwnGradients(ddp.process_group)
            register_hook(ddp, framework, state, own_gradients)
            _hooked[ddp] = state
        self._ddp = ddp
        self._set(True)

    def _set(self, kept: bool) -> None:
        _hooked[self._ddp].kept = kept
        self._ddp.require_backward_grad_sync = self._ddp.require_forward_param_sync = not kept

    def remove(self) -> None:
        self._set(False)


def connect(
    model: Any,
    method: Method | Local,
    optimizers: Iterable[Any],
    *,
    framework: str,
    world_size: int,
    scaler: Any = None,
    start_compression_step: int | None = None,
    timeout: timedelta | float | None = None,
    topology: Topology | None = None,
    sites: Any = None,
) -> Rank:
    """Connect the framework's model, DDP or on one rank bare. All ranks call it, before a backward.

    ``sites``: of a model that is sharded by FSDP2, the dimension of the mesh between sites; for local steps.
    """
    given: dict[str, Any] = {"start_compression_step": start_compression_step, "timeout": timeout}
    if isinstance(method, Method):
        if sites is not None:
            raise ValueError("sites= is for local steps: other methods exchange gradients and do not need it")
        return Rank(register(model, method, framework=framework, world_size=world_size, scaler=scaler,
                             topology=topology, **given))  # fmt: skip
    inner = [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]
    if sites is not None:
        return LocalRank(attach_shards(getattr(model, "_orig_mod", model), inner, method, sites=sites, **given), None)
    ddp = ddp_of(model)
    if ddp is None and world_size > 1:
        raise ValueError(no_ddp(model, framework))
    group = None if ddp is None or ddp.process_group == dist.group.WORLD else ddp.process_group
    apart = None if ddp is None else _Apart(ddp, framework)
    given["topology"] = topology if topology is not None and topology.world_size == world_size else None
    try:
        whole = getattr(model, "_orig_mod", model) if ddp is None else inside(ddp)
        sync = attach(whole, inner, method, process_group=group, **given)
    except BaseException:
        if apart is not None:
            apart.remove()
        raise
    handles = sync.services.handles
    handles.extend(o.register_state_dict_post_hook(_readable) for o in sync.services.optimizers)
    if apart is not None:
        handles.append(apart)
    return LocalRank(sync, None if ddp is None else ddp.process_group)


def _readable(optimizer: torch.optim.Optimizer, state: Any) -> Any:
    """Make the framework's own file one that it can load: NumPy's numbers become Python's."""
    return readable(state, "optimizer")


class Rank:
    """A rank that exchanges gradients: it has the weights of all, so nothing is lent."""

    def __init__(self, sync: DDPSync) -> None:
        self.sync: DDPSync | LocalSync = sync

    @property
    def state(self) -> State:
        return self._hook.state

    @property
    def process_group(self) -> dist.ProcessGroup:
        return self._hook.process_group

    @property
    def _hook(self) -> DDPSync:
        assert isinstance(self.sync, DDPSync)
        return self.sync

    def agree(self, flag: bool) -> bool:
        return self._hook.agree(flag)

    def lend(self) -> None:
        """Put the outer weights, which are equal on all ranks, into the model, until ``take_back``."""

    def take_back(self) -> None: ...

    def outer(self) -> ExitStack:
        return ExitStack()

    def finish(self) -> None:
        """Let all ranks end with the same weights."""

    def state_dict(self) -> dict[str, Any]:
        return self._hook.state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self._hook.load_state_dict(saved)


class LocalRank(Rank):
    """A rank with local steps: its state has its model and optimizers, too."""

    sync: LocalSync

    def __init__(self, sync: LocalSync, group: dist.ProcessGroup | None) -> None:
        self.sync, self._group = sync, group
        self._lent: ExitStack | None = None

    @property
    def state(self) -> State:
        return self.sync.services.state

    @property
    def process_group(self) -> dist.ProcessGroup:
        assert self._group is not None
        return self._group

    def agree(self, flag: bool) -> bool:
        return flag if self._group is None else any_rank(flag, self._group)

    def finish(self) -> None:
        self.sync.finish()

    def lend(self) -> None:
        if self._lent is None:
            with ExitStack() as lent:
                lent.enter_context(self.sync.outer_weights())
                self._lent = lent.pop_all()

    def take_back(self) -> None:
        if self._lent is not None:
            lent, self._lent = self._lent, None
            lent.close()

    def outer(self) -> ExitStack:
        stack = ExitStack()
        if self._lent is None:
            self.lend()
            stack.callback(self.take_back)
        return stack

    def state_dict(self) -> dict[str, Any]:
        return self.sync.state_dict() | {f"own/{self.state.rank}": self.own()}

    def own(self) -> dict[str, Any]:
        assert self._lent is None
        services = self.sync.services
        return {"model": services.model.state_dict(), "optimizers": [o.state_dict() for o in services.optimizers]}

    def put(self, own: Mapping[str, Any]) -> None:
        services = self.sync.services
        services.model.load_state_dict(own["model"])
        for optimizer, one in zip(services.optimizers, own["optimizers"], strict=True):
            optimizer.load_state_dict(one)

    @in_own_modes()
    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load this rank's state, or the union of all ranks'; on another number of ranks, begin again."""
        state, rank = dict(saved), self.state.rank
        same = int(state.get("world_size", 0)) == self.state.size
        if same and f"own/{rank}" in state:
            state["rank"] = rank
        found = fitting(self.sync, state)
        self.put(state[f"own/{rank if same else 0}"])
        found.restore()
