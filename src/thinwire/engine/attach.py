"""``attach``: the one line that a training script needs to use thinwire."""

from __future__ import annotations

import functools
import importlib
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar, overload

import torch
import torch.distributed as dist
from torch import nn

from thinwire.core.collectives.groups import topology_of
from thinwire.core.methods.decoupling import deferring, schedule
from thinwire.core.methods.registry import resolve
from thinwire.core.methods.ssgd import SSGD
from thinwire.core.methods.start import measuring_method
from thinwire.core.pricing.costs import Costs
from thinwire.core.pricing.plans import needs_measurement, rule_of
from thinwire.core.program import Method, Plan, Scope, Topology
from thinwire.core.program.ops import own_modes
from thinwire.engine.backward_hooks import AttachSettings
from thinwire.engine.controller.network import NetworkPrices
from thinwire.engine.controller.pilot import MeasuredPlans, PlanController, TunedPlans
from thinwire.engine.local.settings import QSR, Local, Nesterov, check_name, named_local
from thinwire.engine.local.site import Site
from thinwire.engine.local.sync import LocalSync, tell_apart
from thinwire.engine.look import Look, LookAhead, as_look
from thinwire.engine.parameters import DenseRule, ManagedParameter, check_optimizers, ignore_in, managed_parameters
from thinwire.engine.ranks.communicator import Communicator, SingleRank, meeting_in_attach
from thinwire.engine.services import attached_to, handles
from thinwire.engine.sync import GradientSync
from thinwire.predict.choose.worth import WorthOf, read_worth, shipped
from thinwire.predict.measure.kernels import KERNELS

logger = logging.getLogger("thinwire")
P = ParamSpec("P")
R = TypeVar("R")
L = TypeVar("L", bound=LocalSync)


def _telling_others(attach: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(attach)
    def attached(*args: P.args, **options: P.kwargs) -> R:
        if "server" in options:
            above = importlib.import_module("thinwire.systems.parameter_server.attached")  # in a wing above this one
            return above.attach_to_server(*args, **options)  # type: ignore[no-any-return]
        group: Any = options.get("process_group")
        with own_modes(), meeting_in_attach(group):
            return attach(*args, **options)

    return attached


@overload
def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    method: Local | Literal["local", "diloco"],
    *,
    sync_every: int | str | QSR = ..., sync_every_max: int = ..., warmup_steps: int = ...,
    codec: Method | str | None = ..., outer: Nesterov | None = ..., fragments: int = ...,
    fragment_sync_delay: int | str = ..., fragment_update_alpha: float | None = ...,
    moments: Mapping[str, int] = ..., inside: Method | str | None = ..., look: Look | float | None = ...,
    pace: Literal["common", "own"] = ..., average_buffers: Sequence[str] = ...,
    anchors: Literal["device", "cpu"] = ..., **options: Any,
) -> LocalSync: ...  # fmt: skip


@overload
def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    method: Method | str = "ssgd",
    **options: Any,
) -> GradientSync: ...


@_telling_others
def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    method: Method | Local | str = "ssgd",
    *,
    plan: Plan | str | None = None,
    bucket_cap_mb: float | None = None,
    process_group: dist.ProcessGroup | None = None,
    topology: Topology | None = None,
    scaler: Any = None,
    keep_dense: DenseRule = "auto",
    start_compression_step: int | None = None,
    find_unused_parameters: bool = False,
    gradient_as_bucket_view: bool = True,
    broadcast_buffers: bool = True,
    ignore: Iterable[str] | None = None,
    timeout: timedelta | float | None = None,
    detect_desync: bool = False,
    lossy: bool = False,
    on_failure: Callable[[Exception], None] | None = None,
    costs: Costs | None = None,
    worth: str | Path | None = None,
    look: Look | float | None = None,
    **options: Any,
) -> GradientSync | LocalSync:
    """Average the model's gradients over all ranks during backward. Works in place: no wrapper, no new optimizer.

    All ranks must call it. Rank 0's parameters and buffers are copied to all ranks.

    Args:
        model: on one device; frozen parameters are left alone.
        optimizer: any ``torch.optim`` optimizer that owns the trainable parameters, or a list of several. None: the
            script updates the weights itself; not possible with decoupled methods.
        method: a name with its ``options`` (``"acp", rank=4``) or an instance (``tw.ACP(rank=4)``). "auto" starts as
            S-SGD, times the first dozen steps, measures the network between them (half a step's time in all), and takes
            what it predicts to be fastest; with ``lossy=True`` it starts in 8 bits, and five steps are enough.
            "local" and "diloco", or a ``Local``: no gradients are exchanged; weights are, every few steps.
        bucket_cap_mb: MiB of gradients in a bucket, as in DDP: the same as the ``fusion=`` of a named method.
        plan: a pinned fusion plan. None: the plan is made from sizes, then remade once from the order in which
            gradients arrive, or by the method's fusion rule from measured times. "adaptive": made from measured times,
            and made again if steps take 15 % more or less than predicted.
        process_group: None: the default group. Without any group, or with one rank, nothing is exchanged.
        topology: which rank is on which machine; None: from torchrun's LOCAL_WORLD_SIZE. Without a process
            group, ``Topology(1)`` says that a rank of several is to train alone.
        scaler: the GradScaler in use, so that residuals are kept in unscaled units; LARS and LAMB watch it too. None:
            it is found at its first ``scaler.step(optimizer)``.
        keep_dense: "auto" (the method decides what it does not compress), "none", or (name, parameter) -> bool.
        start_compression_step: number of exact steps before a lossy method begins. None: low rank and Top-k, whose
            first messages carry little information, begin with 2 steps in 8 bits; other methods begin at once. With
            "auto" the measured steps count, and are exact if this is above 0.
        find_unused_parameters: with exact methods, and in 16 bits, ``.grad`` of parameters that no rank used stays
            None in any case. True: with every method, for one more small exchange per step; with decoupled methods
            this holds before ``step()``.
        gradient_as_bucket_view: ``.grad`` may be memory that the next backward overwrites; False: each has its own, as
            under DDP.
        broadcast_buffers: after each backward, all ranks have rank 0's values of buffers that change (BatchNorm).
        ignore: names of parameters and buffers that each rank keeps to itself. None: what
            ``DistributedDataParallel._set_params_and_buffers_to_ignore_for_model`` has been told.
        timeout: seconds (or a timedelta) after which a silent rank is an error; None: the process group's timeout.
        detect_desync: compare the sequence of issued collectives over ranks at every step (debugging).
        lossy: "auto" may choose a method that is not exact.
        on_failure: for callers that decide themselves which ranks continue, as torchft does. It is called with the
            error of a failed exchange, and ``backward`` ends without raising. ``.grad`` is then unusable; the
            optimizer must not step, and this handle must be closed. A step ends without failure only if every rank has
            received everything. None: ``backward`` raises.
        costs: of the network and of compute, for plans that need them: ``Costs.from_json`` of what ``thinwire
            probe --out`` has written. None: remembered from an earlier start, or measured between the first steps.
        worth: what a step of each method is worth on your model, by which ``lossy=True`` chooses: the file written by
            ``thinwire race``, on every machine. None: the table that comes with the package.
        look: a slow look-ahead, ``tw.Look()`` or its ``beta``, for local steps and methods that are not decoupled.
        options: of the method; with "local", ``server="host:port"`` trains through ``thinwire ps server`` without a
            process group, see :func:`~thinwire.parameter_server.attached.attach_to_server`.

    Returns:
        The handle: ``no_sync``, ``stats``, ``state_dict``, ``close``, ...; a ``LocalSync`` for local steps.

    Raises:
        ValueError: bad options, ranks that differ (the message says in what), an optimizer of another model.
        RuntimeError: the model is already attached, a rank did not arrive within ``timeout`` (the message names it), or
            a launcher has started several ranks and there is no process group.
    """
    check_model(model)
    check_name(method)
    if ignore is not None:
        ignore_in(model, ignore)
    optimizers, ahead = listed(optimizer), as_look(look)
    local = named_local(method, options if ahead is None else {**options, "look": ahead})
    if local is not None:
        if not (plan is None and bucket_cap_mb is None and costs is None and worth is None and not lossy):
            raise ValueError("local steps send no gradients: leave out plan, bucket_cap_mb, costs, worth and lossy")
        method, options, ahead = local.method, {}, None
    assert not isinstance(method, Local)  # named_local has taken it
    if bucket_cap_mb is not None:
        options = capped(method, options, bucket_cap_mb)
    auto = isinstance(method, str) and method.lower() == "auto"
    _check_choice(auto, options, plan, lossy, worth)
    chosen = resolve("ssgd" if auto else method, **options)
    if local is None:
        _check_ends(chosen, auto, optimizers, ahead)
    if on_failure is not None and (chosen.decoupled or local is not None):
        what = "local steps have" if local is not None else f"{chosen.name} is decoupled: it has"
        raise ValueError(f"{what} no end of backward at which a failed step could be abandoned: leave out on_failure")
    check_scaler(scaler)
    topology = _topology_of(process_group, topology)
    settings = AttachSettings(
        start_compression_step=start_compression_step,
        find_unused_parameters=find_unused_parameters,
        gradient_as_bucket_view=gradient_as_bucket_view,
        broadcast_buffers=broadcast_buffers,
        pinned=plan if isinstance(plan, Plan) else None,
        timeout=checked_timeout(timeout),
        detect_desync=detect_desync,
        keep_dense=keep_dense,
        on_failure=on_failure,
        look=ahead,
    )
    if topology.world_size == 1:
        chosen, settings = _on_one_rank(chosen, settings)
    elif lossy:  # checkpoints are saved under the chosen method, not under the one used while measuring
        settings, chosen = replace(settings, named=chosen), measuring_method(topology, start_compression_step)
    if chosen.collective == "auto" and (topology.nodes == 1 or max(topology.layout) == 1):
        chosen = replace(chosen, collective="flat")  # type: ignore[type-var]  # nothing to choose from, nor to measure
    managed = managed_parameters(model, chosen, keep_dense)
    check_optimizers(managed, optimizers)
    if local is not None:
        return attach_local(model, optimizers, local, managed, process_group, topology, settings, LocalSync)
    worth_of = (shipped() if worth is None else read_worth(Path(worth))) if lossy else None
    measuring = Measuring(auto, plan == "adaptive", costs, worth_of)
    return _attach_gradients(model, optimizers, chosen, managed, process_group, topology, settings, scaler, measuring)


@dataclass(frozen=True)
class Measuring:
    """How plans are made from measured times. ``worth``: of a step of lossy methods, if these may be chosen."""

    auto: bool = False
    adaptive: bool = False
    costs: Costs | None = None
    worth: WorthOf | None = None

    def controller(
        self, model: nn.Module, method: Method, comm: Communicator, settings: AttachSettings
    ) -> PlanController:
        wanted = self.auto or self.adaptive or (settings.pinned is None and needs_measurement(method))
        if comm.topology.world_size == 1 or not wanted:
            return PlanController(pinned=settings.pinned is not None)
        lossy = self.worth is not None
        return (TunedPlans if rule_of(method) == "tune" else MeasuredPlans)(
            comm, lambda m: managed_parameters(model, m, settings.keep_dense), auto=self.auto, worth=self.worth,
            adaptive=self.adaptive,
            network=NetworkPrices(comm, self.costs, KERNELS if lossy or not method.exact else ("memory",)),
        )  # fmt: skip


def _attach_gradients(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    method: Method,
    managed: list[ManagedParameter],
    group: dist.ProcessGroup | None,
    topology: Topology,
    settings: AttachSettings,
    scaler: Any,
    measuring: Measuring,
) -> GradientSync:
    several, device = topology.world_size > 1, managed[0].parameter.device
    if several:
        tell_apart(optimizers)
    for o in optimizers:
        method.check_optimizer(o)
    asks = settings.on_failure is None
    comm = (
        Communicator(group, topology, device, settings.timeout, asks=asks, attaching=True)
        if several
        else SingleRank(device)
    )
    try:
        controller = measuring.controller(model, method, comm, settings)
        sync = GradientSync(model, optimizers, method, managed, comm, topology, scaler, settings, controller)
    except BaseException as error:
        comm.dismiss(error)
        raise
    comm.attaching = False
    try:
        sync.services.bind(optimizers, sync, scaler)
        if settings.look is not None:
            trained = {m.name: m.parameter for m in managed}
            sync.services.companions["look"] = LookAhead(settings.look, model, trained)
    except BaseException:
        sync.close()
        raise
    return sync


def _check_choice(auto: bool, options: Mapping[str, Any], plan: Any, lossy: bool, worth: Any) -> None:
    """Refuse what does not go together with "auto", or without it."""
    if auto and options:
        raise ValueError(f'"auto" chooses the options itself; leave out {", ".join(options)} or name a method')
    if lossy and not auto:
        raise ValueError('lossy=True is for attach(..., "auto"); the method named here is what runs')
    if worth is not None and not lossy:
        raise ValueError('worth= is for attach(..., "auto", lossy=True), which chooses by what a lossy step is worth')
    if not (plan is None or plan == "adaptive" or isinstance(plan, Plan)):
        raise ValueError(f'plan must be a thinwire.Plan, "adaptive" or None, not {plan!r}')
    if auto and isinstance(plan, Plan):
        raise ValueError('a pinned plan and "auto" exclude each other: name the method that the plan was made for')


def _check_ends(method: Method, auto: bool, optimizers: list[torch.optim.Optimizer], look: Look | None) -> None:
    """Refuse a method that must know of the optimizer's steps without one, and a look that cannot follow them."""
    if not optimizers and deferring(method) is not None:
        raise ValueError(
            f"{method.name} updates weights during the next forward, so it must know the optimizer: pass it, or use a "
            "method that is not decoupled"
        )
    if look is not None and (auto or deferring(method) is not None or not optimizers):
        what = "the optimizer" if not optimizers else "a method by name that is not decoupled"
        raise ValueError(f"look= follows the weights after each step of an optimizer: give attach {what}")


def _topology_of(group: dist.ProcessGroup | None, topology: Topology | None) -> Topology:
    """Return the group's topology, as given or from torchrun's variables; without a group, that of one rank."""
    check_topology(topology)
    joined = group is not None or (dist.is_available() and dist.is_initialized())
    if not joined and topology != Topology(1) and (ranks := os.environ.get("WORLD_SIZE", "1")) not in ("", "1"):
        raise RuntimeError(
            f"WORLD_SIZE is {ranks}, but there is no process group, so each rank would train alone: call "
            'torch.distributed.init_process_group("gloo") before attach, or attach(..., topology=thinwire.Topology(1)) '
            "if that is meant"
        )
    world = dist.get_world_size(group) if joined else 1
    if world < 1:
        raise ValueError("this rank is not in the process group that was given to attach")
    topology = topology or topology_of(world)
    if topology.world_size != world:
        raise ValueError(f"the topology has {topology.world_size} ranks but the group has {world}")
    return topology


def attach_local(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    local: Local,
    managed: list[ManagedParameter],
    group: dist.ProcessGroup | None,
    topology: Topology,
    settings: AttachSettings,
    handle: Callable[..., L],
    site: Site | None = None,
) -> L:
    """Make a handle of local steps among a group's ranks. ``site``: of a model that is sharded inside each of them."""
    if not optimizers:
        raise ValueError("local steps are counted by the optimizer's steps: pass the optimizer")
    device, several, inner = managed[0].parameter.device, topology.world_size > 1, None
    if local.inside is not None and several and topology.nodes == 1:
        raise ValueError("inside= is for several machines: on one, attach the method itself")
    comm = Communicator(group, topology, device, settings.timeout, attaching=True) if several else SingleRank(device)
    try:
        if local.inside is not None and several:
            inner = _attach_inside(model, optimizers, local.inside, comm, settings)
        sync = handle(model, optimizers, local, managed, comm, topology, settings, inner, site)
    except BaseException as error:
        if inner is not None:
            inner.close()
        comm.dismiss(error)
        raise
    comm.attaching = False
    return sync


def _attach_inside(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    method: Method,
    comm: Communicator,
    settings: AttachSettings,
) -> GradientSync:
    topology = comm.topology
    ranks = len(topology.members(Scope.NODE, comm.rank))
    sync = attach(
        model, optimizers, method,
        process_group=comm.machine_group(), topology=Topology(ranks, ranks), timeout=settings.timeout,
        keep_dense=settings.keep_dense, find_unused_parameters=settings.find_unused_parameters,
        gradient_as_bucket_view=settings.gradient_as_bucket_view, broadcast_buffers=False,
    )  # fmt: skip
    assert isinstance(sync, GradientSync)
    return sync


def check_model(model: Any) -> None:
    """Refuse what is no eager module, and one that is attached or wrapped already."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"attach takes a torch.nn.Module first, not {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("attach takes an eager module, because a ScriptModule runs no hooks: script a copy of it later")
    for name, module in model.named_modules():
        if attached_to(module) is not None:
            what = f"its module {name}" if name else "this model"
            raise RuntimeError(f"{what} is attached already; call close() on its GradientSync first")
        if isinstance(module, nn.parallel.DistributedDataParallel):
            what = f"its module {name}" if name else "the model"
            raise TypeError(
                f"{what} is wrapped in DistributedDataParallel, and two exchanges would spoil the gradients: attach to "
                "the bare model, or keep DDP and use model.register_comm_hook(*thinwire.ddp_hook(...))"
            )
    if any(model is module for handle in handles() for module in handle.services.model.modules()):
        raise RuntimeError("this module belongs to a model that is attached already; call close() on its handle first")


def listed(optimizer: Any) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    for o in optimizers:
        if not isinstance(o, torch.optim.Optimizer):
            raise TypeError(
                f"attach takes the optimizer second, not {type(o).__name__}: if that wraps a torch optimizer, pass the "
                "inner one; None if the script updates the weights by itself"
            )
    return list(dict.fromkeys(optimizers))  # an optimizer given twice would count every step twice


def _on_one_rank(method: Method, settings: AttachSettings) -> tuple[Method, AttachSettings]:
    """Return S-SGD in place of the method, because one rank sends nothing, and the settings that say so."""
    note = ""
    if not method.exact:
        why = method.single_rank_note
        note = f"one rank only: nothing is sent, so nothing is compressed; {method.name} runs as ssgd{why}"
        if why:
            logger.warning("thinwire: %s", note)
    named = replace(method, collective="flat") if method.collective == "auto" else method  # type: ignore[type-var]
    return SSGD(fusion=method.fusion, **schedule(method)), replace(settings, note=note, named=named)


def capped(method: Method | str, options: Mapping[str, Any], bucket_cap_mb: Any) -> dict[str, Any]:
    cap = bucket_cap_mb
    if isinstance(cap, bool) or not isinstance(cap, (int, float)) or not cap > 0:
        raise ValueError(f"bucket_cap_mb={cap!r} must be a positive number of MiB")
    if isinstance(method, Method):
        raise ValueError(f"{type(method).__name__}(...) carries its own options: pass fusion={cap!r} to it")
    if isinstance(method, str) and method.lower() == "auto":
        raise ValueError(f'"auto" chooses the buckets too: leave out bucket_cap_mb={cap!r} or name a method')
    if "fusion" in options:
        raise ValueError(f"bucket_cap_mb={cap!r} and fusion={options['fusion']!r} mean the same: give only one of them")
    return {**options, "fusion": cap}


def checked_timeout(timeout: Any) -> timedelta | None:
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
        raise ValueError(f"timeout={timeout!r} must be a number of seconds above 0, a timedelta, or None")
    return timedelta(seconds=seconds)


def check_scaler(scaler: Any) -> None:
    if scaler is not None and not (callable(getattr(scaler, "scale", None)) and hasattr(scaler, "is_enabled")):
        raise TypeError(f"scaler={scaler!r} must be a torch.amp.GradScaler or None")


def check_topology(topology: Any) -> None:
    if topology is not None and not isinstance(topology, Topology):
        raise TypeError(f"topology={topology!r} must be a thinwire.Topology or None")
