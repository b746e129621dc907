"""What a framework's loop and checkpoints see of a rank, whatever the method: gradients by DDP's hook, or local steps.

Local steps run on a model that the framework has wrapped in DDP, which then averages no gradients, or that is sharded.

Two things keep DDP from averaging: it is told not to synchronize, which costs nothing; and if a framework tells it to
again (Lightning does, with manual optimization), a communication hook leaves each rank its own gradients.

A checkpoint holds all ranks' states, gathered on rank 0 or one file per rank in a folder: residuals differ between
ranks, with local steps everything does, and most frameworks save only rank 0's objects.
"""

from __future__ import annotations

import io
import logging
import weakref
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from thinwire.adapters.ddp import DDPSync, any_rank, control_device, promise_on
from thinwire.adapters.ddp_module import ddp_of, inside, no_ddp, register, register_hook
from thinwire.adapters.fsdp2 import attach as attach_shards
from thinwire.core.durable import read_file, readable, write_whole
from thinwire.core.program import Method, State, Topology
from thinwire.core.program.ops import in_own_modes
from thinwire.engine.attach import attach
from thinwire.engine.local.settings import Local
from thinwire.engine.local.sync import LocalSync
from thinwire.engine.services import fitting

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket


log = logging.getLogger("thinwire")


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


# --- checkpoints of frameworks ----------------------------------------------------------------------------------------

_OWED = ("residual/", "local/", "offset/")
_OWN = (*_OWED, "sent/", "own/")


def gathered_state(sync: Rank) -> dict[str, Any]:
    """Return all ranks' states on rank 0, else this rank's, on the CPU. All ranks must call it, between steps."""
    problem, state = None, _on_cpu(sync.state_dict())
    try:
        state = readable(state)
    except ValueError as error:
        problem = error
    if sync.agree(problem is not None):
        raise ValueError(f"nothing was saved: {problem or 'another rank says why'}") from problem
    if not sync.agree(any(key.startswith(_OWN) for key in state)) or sync.state.size == 1:
        return state
    device, group = control_device(sync.process_group), sync.process_group
    if sync.state.rank == 0:
        for rank in range(1, sync.state.size):
            state.update(_received(dist.get_global_rank(group, rank), group, device))
    else:
        file = io.BytesIO()
        torch.save({key: value for key, value in state.items() if key.startswith(_OWN)}, file)
        message = torch.frombuffer(file.getbuffer(), dtype=torch.uint8).to(device)
        root = dist.get_global_rank(group, 0)
        dist.send(torch.tensor([message.numel()], device=device), root, group=group)
        dist.send(message, root, group=group)
    return state


def _received(source: int, group: Any, device: torch.device) -> Mapping[str, Any]:
    length = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(length, source, group=group)
    message = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.recv(message, source, group=group)
    found: Mapping[str, Any] = torch.load(io.BytesIO(message.cpu().numpy().tobytes()), weights_only=True)
    return found


def save_in(folder: Path, name: str, sync: Rank, **facts: Any) -> None:
    """Write this rank's file atomically, with ``facts``, plain values. No collective."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(_file(folder, name, sync.state.rank), {"state": _on_cpu(sync.state_dict()), **facts})


def load_from(folder: Path, name: str, sync: Rank, **facts: Any) -> bool:
    """Load what ``save_in`` wrote; on other ranks, the mean. All ranks must call it. False: there is no rank's file.

    If only some ranks have saved (under ``if is_main_process``), all take over rank 0's part: residuals begin at zero,
    local steps at the outer weights. What is wrong on one rank is an error on all.
    """
    first = _file(folder, name, 0)
    if not sync.agree(first.exists() or _file(folder, name, sync.state.rank).exists()):
        return False
    problem, some = None, False
    try:
        if first.exists():  # is a file that this rank needs not here?
            before = int(read_file(first)["state"]["world_size"])
            needed = [sync.state.rank] if before == sync.state.size else range(before)
            some = not all(_file(folder, name, rank).exists() for rank in needed)
    except (OSError, ValueError, KeyError) as error:
        problem = error
    some = sync.agree(some)
    try:
        if problem is None:
            sync.load_state_dict(_first_of(folder, name, facts) if some else _read(folder, name, sync, facts))
    except (OSError, ValueError, KeyError) as error:
        problem = error
    if sync.agree(problem is not None):
        reason = problem or "another rank could not read its own, and says why"
        raise ValueError(f"no state of thinwire's hook can be loaded from {folder}: {reason}") from problem
    return True


def _read(folder: Path, name: str, sync: Rank, facts: Mapping[str, Any]) -> dict[str, Any]:
    own, start = _file(folder, name, sync.state.rank), _file(folder, name, 0)
    if not start.exists():  # the folder belongs to another machine
        start = own
    if not start.exists():
        raise ValueError(f"there is no {own.name}; all ranks must save, and must see the folder that they load from")
    content = read_file(start)
    state: dict[str, Any] = content["state"]
    before = int(state["world_size"])
    if before == sync.state.size:
        mine = content if own == start else read_file(own)
        _check(own, mine, facts)
        found: dict[str, Any] = mine["state"]
        if (found["step"], found["world_size"]) != (state["step"], before):
            raise ValueError(f"{own.name} is from another step or number of ranks than {start.name}")
        return found
    _check(start, content, facts)
    for rank in range(before):
        other = _file(folder, name, rank)
        theirs = read_file(other)["state"]
        if theirs["step"] != state["step"]:
            raise ValueError(f"{other.name} is from another step than {start.name}")
        state.update({key: value for key, value in theirs.items() if key.startswith(_OWN)})
    return state


def _first_of(folder: Path, name: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return rank 0's state, as of a training on one rank, without what is owed to the model."""
    first = _file(folder, name, 0)
    content = read_file(first)
    _check(first, content, facts)
    state: dict[str, Any] = content["state"]
    if any(key.startswith(_OWN) for key in state):
        log.warning(
            "thinwire: %s has only some ranks' states, so residuals begin at zero, and local steps at the outer "
            "weights: call save_state on all ranks to keep both",
            folder,
        )
    return {k: x for k, x in state.items() if not k.startswith(_OWED)} | {"world_size": 1, "residuals": 0}


def _check(path: Path, content: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    for key, value in facts.items():
        if content.get(key) != value:
            raise ValueError(f"{path.name} does not belong to the model's {key}: it was saved by another run or step")


def _file(folder: Path, name: str, rank: int) -> Path:
    return folder / f"{name}_rank{rank}.pt"


def _on_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.cpu()
        if isinstance(value, dict):
            return {key: moved(one) for key, one in value.items()}
        return type(value)(map(moved, value)) if isinstance(value, (list, tuple)) else value

    return {key: moved(value) for key, value in state.items()}
