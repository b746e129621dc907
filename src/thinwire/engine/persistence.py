"""State of a GradientSync as a flat dict, and back, also on another number of ranks.

Keys: ``residual/<rank>/<name>`` and ``local/<rank>/<field>/<name>`` (ranks have different ones),
``shared/<field>/<name>`` (equal on all ranks), and plain values. Residuals are in unscaled gradient units, so neither a
bucket plan nor a loss scale is in them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thinwire.engine.parameters import managed_parameters
from thinwire.program import Method, Plan, Topology, working_dtype
from thinwire.program.state import extend
from thinwire.program.trace import memory

if TYPE_CHECKING:
    from thinwire.engine.sync import GradientSync

VERSION = 1
_NOW = {
    "merge": "fusion",
    "ordered": "deterministic",
    "wire": "value_dtype",
    "guard": "check_finite",
    "eager": "update_in_step",
    "check": "poison_stale",
}
"""What options are called that had another name when states of this version were first written."""

log = logging.getLogger("thinwire")


def method_of(sync: GradientSync) -> Method:
    """The method whose state this is: on a single rank not the one that runs, but the one that was asked for."""
    return sync._settings.named or sync.method


def to_state_dict(sync: GradientSync) -> dict[str, Any]:
    """The state of this rank."""
    snapshot = sync.state.snapshot()
    method, rank = method_of(sync), sync.rank
    flat: dict[str, Any] = {
        "version": VERSION,
        "method": method.name,
        "options": _options(method),
        "step": snapshot["step"],
        "world_size": sync.topology.world_size,
        "rank": rank,
        "plan": sync.plan.to_json(),
    }
    flat |= counted(snapshot) | scaled(sync.scaler) | _blank_of(sync, method)
    for name, value in snapshot["residual"].items():
        flat[f"residual/{rank}/{name}"] = value
    flat.update(local_keys(snapshot, rank))
    for name, begin in snapshot["offset"].items():
        flat[f"offset/{rank}/{name}"] = begin
    for field, named in snapshot["shared"].items():
        for name, value in named.items():
            flat[f"shared/{field}/{name}"] = value
    for name, companion in sync.companions.items():
        flat |= {f"companion/{name}/{key}": value for key, value in companion.state_dict().items()}
    return flat


def _options(method: Method) -> str:
    return json.dumps({key: str(value) for key, value in method.options().items()}, sort_keys=True)


def saved_options(text: str, method: Method) -> dict[str, str]:
    """The options in a state by the names that they have now; ``method`` is the attached one."""
    known = method.options()
    return {name if name in known else _NOW.get(name, name): value for name, value in json.loads(text).items()}


def _blank_of(sync: GradientSync, method: Method) -> dict[str, Any]:
    """Zeros for all that this rank will remember, or keep for when there are several."""
    managed, dense = sync._managed, sync._dense
    if method is not sync.method:
        managed = managed_parameters(sync.model, method, sync._settings.keep_dense)
        dense = method.beside() or dense
    compressed = [(m.name, m.parameter) for m in managed if not m.dense]
    flat: dict[str, Any]
    if not method.shards:
        flat = {**blank(method, compressed, sync.topology, sync.rank)}
    elif method is sync.method:
        flat = blank_shards(sync)
    else:  # whole: there are no shards
        flat = {
            f"residual/{sync.rank}/{name}": torch.zeros_like(x, dtype=working_dtype(x.dtype)) for name, x in compressed
        }
    return flat | blank(dense, [(m.name, m.parameter) for m in managed if m.dense], sync.topology, sync.rank)


def blank(method: Method, parameters: Iterable[tuple[str, Tensor]], topology: Topology, rank: int) -> dict[str, Tensor]:
    """Zeros for all that a method will remember: DCP fills only the keys that a state_dict shows it before."""
    flat: dict[str, Tensor] = {}
    for name, x in parameters:
        found = memory(method, [(name, x.shape)], topology, rank=rank, dtype=x.dtype)
        for value in found.residuals.values():
            flat[f"residual/{rank}/{name}"] = torch.zeros_like(value, device=x.device)
        for (field, _), value in found.fields.items():
            flat[f"shared/{field}/{name}"] = torch.zeros_like(value, device=x.device)
        for (field, _), value in found.locals.items():
            flat[f"local/{rank}/{field}/{name}"] = torch.zeros_like(value, device=x.device)
    return flat


def local_keys(snapshot: Mapping[str, Any], rank: int) -> dict[str, Tensor]:
    """The local fields of a snapshot under their keys."""
    return {f"local/{rank}/{field}/{n}": x for field, named in snapshot["local"].items() for n, x in named.items()}


def local_of(state: Mapping[str, Any], rank: int, same_size: bool) -> dict[str, dict[str, Tensor]]:
    """The local fields for this rank, by field and name: its own, or on another number of ranks the mean."""
    everyone = split(state, "local/")
    if same_size:
        mine = everyone.get(str(rank), {})
    else:
        keys = sorted({key for named in everyone.values() for key in named})
        mine = {key: reshard([named[key] for named in everyone.values()], len(everyone)) for key in keys}
    return split(mine, "")


def blank_shards(sync: GradientSync) -> dict[str, Any]:
    """As ``blank``, for a method whose residuals are slices that follow from the plan in force."""
    flat: dict[str, Any] = {}
    for entry in sync.plan.buckets(sync.state.step):
        if entry.dense:
            continue
        first = sync._by_name[entry.names[0]].parameter
        shapes = [(name, sync._by_name[name].shape) for name in entry.names]
        found = memory(sync.method, shapes, sync.topology, rank=sync.rank, dtype=first.dtype)
        for name, value in found.residuals.items():
            flat[f"residual/{sync.rank}/{name}"] = torch.zeros_like(value, device=first.device)
            flat[f"offset/{sync.rank}/{name}"] = found.offsets[name]
    return flat


def split(state: Mapping[str, Any], prefix: str) -> dict[str, dict[str, Tensor]]:
    """``prefix<first>/<name>`` keys as {first: {name: tensor}}."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, value in state.items():
        if key.startswith(prefix):
            first, _, name = key[len(prefix) :].partition("/")
            found.setdefault(first, {})[name] = value
    return found


def counted(snapshot: Mapping[str, Any]) -> dict[str, int]:
    """The dropped steps of a snapshot; nothing if there are none."""
    return {"dropped": snapshot["dropped"]} if snapshot["dropped"] else {}


def scaled(scaler: Any) -> dict[str, bool]:
    """What a state says of a loss scale that is in force; nothing if there is none."""
    return {} if scaler is None or not scaler.is_enabled() else {"scaled": True}


def check_scaled(state: Mapping[str, Any], scaler: Any) -> None:
    """Raise ``ValueError`` if what is owed cannot be added to the next gradients, which carry an unknown scale."""
    if state.get("scaled") and scaler is None and owes(state):
        raise ValueError(
            "the state was saved with a GradScaler in use, which must be known before the next backward: hand it over "
            "as scaler="
        )


def owes(state: Mapping[str, Any]) -> bool:
    """Whether there is anything in it that another method could not take over."""
    return any(key.startswith(("residual/", "local/", "shared/")) for key in state)


def split_shared(state: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """The shared fields; a blank one was never committed (no method's is all zeros)."""
    return {f: {n: x for n, x in named.items() if x.any()} for f, named in split(state, "shared/").items()}


@dataclass(frozen=True)
class Fitting:
    """A state that was found to fit, for ``restore`` and then ``adopt``.

    Attributes:
        snapshot: for ``State.restore``.
        companions: what was saved of each; none of one that was not there.
        plan: to be put in force, if any.
    """

    snapshot: dict[str, Any]
    companions: dict[str, dict[str, Any]]
    plan: Plan | None


def from_state_dict(sync: GradientSync, state: Mapping[str, Any]) -> None:
    """Restore; see ``GradientSync.load_state_dict``."""
    found = fitting(sync, state)
    restore(sync, found)
    adopt(sync, found)


def fitting(sync: GradientSync, state: Mapping[str, Any]) -> Fitting:
    """What is to be taken over of a state. Changes nothing.

    Raises:
        ValueError: it does not fit the model or the method, or lacks what this rank needs.
    """
    if state.get("version") != VERSION:
        raise ValueError(f"this is not a thinwire state of version {VERSION}; it says {state.get('version')!r}")
    method, size = method_of(sync), sync.topology.world_size
    if state["method"] != method.name and owes(state):
        raise ValueError(
            f"the state was saved by {state['method']!r} but {method.name!r} is attached; attach with the same "
            "method, or start without this state (what was owed to the model is then lost)"
        )
    if size > 1:
        check_scaled(state, sync.scaler)
    residuals, offsets = split(state, "residual/"), split(state, "offset/")
    old_size = int(state["world_size"])
    local = local_of(state, sync.rank, old_size == size)
    _check_names(sync, {name for named in [*residuals.values(), *local.values()] for name in named})
    if old_size == size:
        mine = residuals.get(str(sync.rank), {})
        if residuals and not mine and int(state["step"]) > 0:
            raise ValueError(
                f"the state holds no residuals of rank {sync.rank}: save with thinwire.checkpoint.save, "
                "which keeps those of every rank"
            )
    else:
        for rank, slices in offsets.items():
            for name, begin in slices.items():
                residuals[rank][name] = extend(residuals[rank][name], int(begin), sync._by_name[name].shape)
        offsets = {}
        mine = _resharded(residuals, old_size, sync)
    offset = {name: int(begin) for name, begin in offsets.get(str(sync.rank), {}).items()}
    for name, value in mine.items():
        if name not in offset and value.shape != sync._by_name[name].shape:
            raise ValueError(
                f"the state holds a residual of {name} of shape {list(value.shape)}, but the model's parameter has "
                f"{list(sync._by_name[name].shape)}"
            )
    stands_in = method is not sync.method
    if stands_in:  # kept, not used: what is zero needs no memory
        mine = {name: value for name, value in mine.items() if value.any()}
        local = {f: {name: x for name, x in named.items() if x.any()} for f, named in local.items()}
    shared = split_shared(state)
    options, before = json.loads(_options(method)), saved_options(state["options"], method)
    if shared and _without_fusion(options) != _without_fusion(before):
        log.warning("thinwire: the method's options changed; factors are drawn anew, residuals are kept")
        shared = {}
    device = sync.device
    snapshot = {
        "step": state["step"],
        "dropped": state.get("dropped", 0),
        "residual": {name: value.to(device) for name, value in mine.items()},
        "offset": offset,
        "shared": {f: {name: value.to(device) for name, value in named.items()} for f, named in shared.items()},
        "local": {f: {name: value.to(device) for name, value in named.items()} for f, named in local.items()},
    }
    companions: dict[str, dict[str, Any]] = {}
    for name in sync.companions:
        prefix = f"companion/{name}/"
        if saved := {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}:
            companions[name] = saved
        else:
            log.warning("thinwire: the state was saved without %s, which begins anew", name)
    same = state["method"] == method.name and before == options
    plan = None
    # What stands in on one rank plans for itself alone.
    if sync._settings.pinned is None and same and state.get("plan") and stands_in == (old_size == 1):
        plan = Plan.from_json(state["plan"])
        try:
            plan.check(m.name for m in sync._managed)
        except ValueError:
            plan = None  # another set of trainable parameters: the fresh plan stays
    return Fitting(snapshot, companions, plan)


def restore(sync: GradientSync, found: Fitting) -> Callable[[], None]:
    """Restore memory and companions. Returns what undoes it; if it raises, it is undone already."""
    before, restored = sync.state.snapshot(), sync.state.restored
    companions = [(sync.companions[name], saved) for name, saved in found.companions.items()]
    earlier = [companion.state_dict() for companion, _ in companions]
    loaded = 0

    def undo() -> None:  # the step first: companions count from it
        sync.state.restore(before)
        sync.state.restored = restored
        for (companion, _), state in zip(companions[:loaded], earlier):
            companion.load_state_dict(state)

    sync.state.restore(found.snapshot)
    try:
        for companion, saved in companions:
            companion.load_state_dict(saved)
            loaded += 1
    except BaseException:
        undo()
        raise
    return undo


def adopt(sync: GradientSync, found: Fitting) -> None:
    """Put the saved plan in force, if it is to be. All ranks must call it."""
    if found.plan is not None:
        sync.adopt_plan(found.plan)


def _without_fusion(options: Mapping[str, str]) -> dict[str, str]:
    """The options that factors depend on: not which tensors share a bucket."""
    return {key: value for key, value in options.items() if key != "fusion"}


def _check_names(sync: GradientSync, names: set[str]) -> None:
    unknown = sorted(names - set(sync._by_name))
    if unknown:
        raise ValueError(f"the state holds residuals of parameters that the model has not: {', '.join(unknown[:3])}")


def _resharded(residuals: Mapping[str, Mapping[str, Tensor]], old_size: int, sync: GradientSync) -> dict[str, Tensor]:
    if residuals and len(residuals) < old_size:
        raise ValueError(
            f"the state holds residuals of {len(residuals)} of {old_size} ranks, but now there are "
            f"{sync.topology.world_size}: save with thinwire.checkpoint.save, which keeps those of every rank"
        )
    names = sorted({name for named in residuals.values() for name in named})
    mine = {name: reshard([named[name] for named in residuals.values() if name in named], old_size) for name in names}
    if any(x.any() for x in mine.values()):
        before = sum(float(x.norm() ** 2) for named in residuals.values() for x in named.values()) ** 0.5
        after = (sync.topology.world_size * sum(float(x.norm() ** 2) for x in mine.values())) ** 0.5
        log.warning(
            "thinwire: residuals taken over, saved by %d, now of %d: every rank gets their mean (norm over ranks %.4g, "
            "now %.4g)%s",
            old_size, sync.topology.world_size, before, after,
            ", and keeps it until there are several ranks again" if sync.topology.world_size == 1 else "",
        )  # fmt: skip
    return mine


def reshard(residuals: Sequence[Tensor], old_size: int) -> Tensor:
    """The mean over the old ranks of one parameter's residual: the update still owed to the model is kept exactly."""
    total = torch.zeros_like(residuals[0])
    for x in residuals:
        total += x
    return total / old_size
