"""State of a GradientSync as a flat dict, and back, also on another number of ranks.

Keys: ``residual/<rank>/<name>`` and ``local/<rank>/<field>/<name>`` (ranks have different ones),
``shared/<field>/<name>`` (equal on all ranks), and plain values. Residuals are in unscaled gradient units, so neither a
bucket plan nor a loss scale is in them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thinwire.program import Method, Plan, Topology
from thinwire.program.state import extend
from thinwire.program.trace import memory

if TYPE_CHECKING:
    from thinwire.engine.sync import GradientSync

VERSION = 1
log = logging.getLogger("thinwire")


def to_state_dict(sync: GradientSync) -> dict[str, Any]:
    """The state of this rank."""
    snapshot = sync.state.snapshot()
    options = {key: str(value) for key, value in sync.method.options().items()}
    flat: dict[str, Any] = {
        "version": VERSION,
        "method": sync.method.name,
        "options": json.dumps(options, sort_keys=True),
        "step": snapshot["step"],
        "world_size": sync.topology.world_size,
        "rank": sync.rank,
        "plan": sync.plan.to_json(),
    }
    compressed = [(m.name, m.parameter) for m in sync._managed if not m.dense]
    flat.update(
        blank(sync.method, compressed, sync.topology, sync.rank) if not sync.method.shards else blank_shards(sync)
    )
    for name, value in snapshot["residual"].items():
        flat[f"residual/{sync.rank}/{name}"] = value
    flat.update(blank(sync._dense, [(m.name, m.parameter) for m in sync._managed if m.dense], sync.topology, sync.rank))
    flat.update(local_keys(snapshot, sync.rank))
    for name, begin in snapshot["offset"].items():
        flat[f"offset/{sync.rank}/{name}"] = begin
    for field, named in snapshot["shared"].items():
        for name, value in named.items():
            flat[f"shared/{field}/{name}"] = value
    for name, companion in sync.companions.items():
        flat |= {f"companion/{name}/{key}": value for key, value in companion.state_dict().items()}
    return flat


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


def split_shared(state: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """The shared fields; a blank one was never committed (no method's is all zeros)."""
    return {f: {n: x for n, x in named.items() if x.any()} for f, named in split(state, "shared/").items()}


def from_state_dict(sync: GradientSync, state: Mapping[str, Any]) -> None:
    """Restore; see ``GradientSync.load_state_dict``."""
    if state.get("version") != VERSION:
        raise ValueError(f"this is not a thinwire state of version {VERSION}; it says {state.get('version')!r}")
    if state["method"] != sync.method.name:
        raise ValueError(
            f"the state was saved by {state['method']!r} but {sync.method.name!r} is attached; attach with the same "
            "method, or start without this state (what was owed to the model is then lost)"
        )
    residuals, offsets = split(state, "residual/"), split(state, "offset/")
    old_size = int(state["world_size"])
    local = local_of(state, sync.rank, old_size == sync.topology.world_size)
    _check_names(sync, {name for named in [*residuals.values(), *local.values()] for name in named})
    if old_size == sync.topology.world_size:
        mine = residuals.get(str(sync.rank), {})
        if not mine and (residuals or sync.method.has_residual) and int(state["step"]) > 0 and residuals:
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
    device = sync._managed[0].parameter.device
    shared = split_shared(state)
    options = json.dumps({key: str(value) for key, value in sync.method.options().items()}, sort_keys=True)
    if shared and _without_merge(options) != _without_merge(state["options"]):
        log.warning("thinwire: the method's options changed; factors are drawn anew, residuals are kept")
        shared = {}
    snapshot = {
        "step": state["step"],
        "residual": {name: value.to(device) for name, value in mine.items()},
        "offset": {name: int(begin) for name, begin in offsets.get(str(sync.rank), {}).items()},
        "shared": {f: {name: value.to(device) for name, value in named.items()} for f, named in shared.items()},
        "local": {f: {name: value.to(device) for name, value in named.items()} for f, named in local.items()},
    }
    sync.state.restore(snapshot)
    for name, companion in sync.companions.items():
        prefix = f"companion/{name}/"
        if saved := {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}:
            companion.load_state_dict(saved)
        else:
            log.warning("thinwire: the state was saved without %s, which begins anew", name)
    if sync._settings.pinned is None and options == state["options"] and state.get("plan"):
        plan = Plan.from_json(state["plan"])
        try:
            plan.check(m.name for m in sync._managed)
        except ValueError:
            return  # another set of trainable parameters: the fresh plan stays
        sync.adopt_plan(plan)


def _without_merge(options: str) -> dict[str, Any]:
    """The options that factors depend on: not which tensors share a bucket."""
    return {key: value for key, value in json.loads(options).items() if key != "merge"}


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
    if mine:
        before = sum(float(x.norm() ** 2) for named in residuals.values() for x in named.values()) ** 0.5
        after = (sync.topology.world_size * sum(float(x.norm() ** 2) for x in mine.values())) ** 0.5
        log.warning(
            "thinwire: residuals of %d ranks taken over by %d: each gets their mean (norm over ranks %.4g, now %.4g)",
            old_size, sync.topology.world_size, before, after,
        )  # fmt: skip
    return mine


def reshard(residuals: Sequence[Tensor], old_size: int) -> Tensor:
    """The mean over the old ranks of one parameter's residual: the update still owed to the model is kept exactly."""
    total = torch.zeros_like(residuals[0])
    for x in residuals:
        total += x
    return total / old_size
