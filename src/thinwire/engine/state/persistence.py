"""Convert a session's state to a flat dict and back, also on another number of ranks.

Keys: ``residual/<rank>/<name>`` and ``local/<rank>/<field>/<name>`` (different on each rank),
``shared/<field>/<name>`` (equal on all ranks), and plain values. Residuals are in unscaled gradient units, so they
depend neither on the bucket plan nor on the loss scale. ``attach``, local steps (whose residuals are of weights), the
DDP hook and FSDP2's replicas each add what only they have.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.core.program import Method, Topology
from thinwire.core.program.state import extend
from thinwire.core.program.trace import memory
from thinwire.engine.parameters import gradient_dtype
from thinwire.engine.session import Session

VERSION = 1
LOCAL = "local steps"  # a key that states of local steps have, and no others
log = logging.getLogger("thinwire")


def to_flat(
    session: Session,
    blanks: Mapping[str, Any],
    shapes: Mapping[str, Sequence[int]] | None,
    snapshot: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return this rank's state. ``blanks``: zeros for what will exist, as DCP fills only keys that are there."""
    state, method = session.state, session.named  # without ``shapes``, slices are saved with their offsets
    rank, snapshot = state.rank, state.snapshot() if snapshot is None else snapshot
    flat: dict[str, Any] = {
        "version": VERSION,
        "method": method.name,
        "options": options_of(method),
        "step": snapshot["step"],
        "world_size": state.size,
        "rank": rank,
    }
    if snapshot["dropped"]:
        flat["dropped"] = snapshot["dropped"]
    if session.scaler is not None and session.scaler.is_enabled():
        flat["scaled"] = True
    flat |= blanks
    for name, value in snapshot["residual"].items():
        begin = snapshot["offset"].get(name)
        if begin is not None and shapes is None:
            flat[f"offset/{rank}/{name}"] = begin
        elif begin is not None and shapes is not None and name in shapes:
            value = extend(value, begin, shapes[name])
        flat[f"residual/{rank}/{name}"] = value
    for field, named in snapshot["local"].items():
        flat |= {f"local/{rank}/{field}/{name}": value for name, value in named.items()}
    for field, named in snapshot["shared"].items():
        flat |= {f"shared/{field}/{name}": value for name, value in named.items()}
    return flat


def from_flat(session: Session, saved: Mapping[str, Any], shapes: Mapping[str, Sequence[int]] | None) -> dict[str, Any]:
    """Return what this rank takes over of its state, or of the union of another number's, for ``State.restore``."""
    method, rank, size = session.named, session.rank, session.state.size
    if saved["method"] != method.name and owes(saved):
        raise ValueError(
            f"the state was saved by {saved['method']!r} but the method here is {method.name!r}: use the same method, "
            "or start without this state (the residuals are then lost)"
        )
    if saved.get("scaled") and session.scaler is None and owes(saved) and size > 1:
        raise ValueError(  # residuals cannot be added to the next gradients, which carry an unknown scale
            "the state was saved with a GradScaler in use, which must be known before the next backward: pass it as "
            "scaler="
        )
    residuals, offsets, old_size = split(saved, "residual/"), split(saved, "offset/"), int(saved["world_size"])
    local = _local_of(saved, rank, old_size == size)
    if shapes is not None:
        named = {name for some in [*residuals.values(), *local.values()] for name in some}
        if unknown := sorted(named - set(shapes)):
            raise ValueError(
                f"the state holds residuals of parameters that the model does not have: {', '.join(unknown[:3])}"
            )
    if old_size == size:
        mine = residuals.get(str(rank), {})
        if residuals and not mine and int(saved["step"]) > 0:
            raise ValueError(
                f"the state holds no residuals of rank {rank}: save with thinwire.checkpoint.save, "
                "which keeps those of every rank"
            )
    else:
        for other, slices in offsets.items():
            for name, begin in slices.items():
                assert shapes is not None
                residuals[other][name] = extend(residuals[other][name], int(begin), shapes[name])
        offsets = {}
        mine = _resharded(residuals, old_size, size)
    offset = {name: int(begin) for name, begin in offsets.get(str(rank), {}).items()}
    for name, value in mine.items():
        if shapes is not None and name not in offset and value.shape != torch.Size(shapes[name]):
            raise ValueError(
                f"the state holds a residual of {name} of shape {list(value.shape)}, but the model's parameter has "
                f"{list(shapes[name])}"
            )
    if method is not session.method:  # another method runs in its place: state is kept but not used; drop zeros
        mine = {name: value for name, value in mine.items() if value.any()}
        local = {field: {name: x for name, x in named.items() if x.any()} for field, named in local.items()}
    # All-zero fields are blanks that were never committed: no method's field is all zeros.
    shared = {f: {n: x for n, x in named.items() if x.any()} for f, named in split(saved, "shared/").items()}
    options, before = json.loads(options_of(method)), json.loads(saved["options"])
    changed = {key for key, value in before.items() if options.get(key) != value}
    if any(shared.values()) and changed - {"fusion", "bases_from_first"}:
        log.warning("thinwire: the method's options changed; factors are drawn again, residuals are kept")
        shared = {}
    return {
        "step": saved["step"],
        "dropped": saved.get("dropped", 0),
        "residual": mine,
        "offset": offset,
        "shared": shared,
        "local": local,
    }


def name_of(key: str) -> str:
    """Return the parameter's name in a key of a flat state; "" if it belongs to none."""
    kind, *rest = key.split("/", 3 if key.startswith("local/") else 2)
    return rest[-1] if rest and kind in ("residual", "offset", "local", "shared") else ""


def frozen_since(model: nn.Module, managed: Container[str]) -> set[str]:
    """Return the parameters that are not managed because they were frozen at ``attach``."""
    return {name for name, p in model.named_parameters() if not p.requires_grad and name not in managed}


def without(state: Mapping[str, Any], frozen: Container[str]) -> dict[str, Any]:
    """Return a state without what belongs to frozen parameters: they get no gradients to which it could be added."""
    warn_left_out({name_of(key) for key in state if name_of(key) in frozen})
    return {key: value for key, value in state.items() if name_of(key) not in frozen}


def warn_left_out(names: Iterable[str]) -> None:
    if some := sorted(names):
        log.warning("thinwire: %s: frozen now, so what the state holds for it is left out", ", ".join(some[:3]))


def on_device(snapshot: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    moved = {"residual": {name: value.to(device) for name, value in snapshot["residual"].items()}}
    for kind in ("shared", "local"):
        moved[kind] = {f: {n: x.to(device) for n, x in named.items()} for f, named in snapshot[kind].items()}
    return {**snapshot, **moved}


def owes(state: Mapping[str, Any]) -> bool:
    return any(key.startswith(("residual/", "local/", "shared/")) for key in state)


def options_of(method: Method) -> str:
    return json.dumps({key: str(value) for key, value in method.options().items()}, sort_keys=True)


def blank(method: Method, parameters: Iterable[tuple[str, Tensor]], topology: Topology, rank: int) -> dict[str, Tensor]:
    """Return zeros for all state that a method will have: DCP fills only keys that the given state_dict has."""
    flat: dict[str, Tensor] = {}
    for name, x in parameters:
        found = memory(method, [(name, x.shape)], topology, rank=rank, dtype=gradient_dtype(x))
        for value in found.residuals.values():
            flat[f"residual/{rank}/{name}"] = torch.zeros_like(value, device=x.device)
        for (field, _), value in found.fields.items():
            flat[f"shared/{field}/{name}"] = torch.zeros_like(value, device=x.device)
        for (field, _), value in found.locals.items():
            flat[f"local/{rank}/{field}/{name}"] = torch.zeros_like(value, device=x.device)
    return flat


def _local_of(state: Mapping[str, Any], rank: int, same_size: bool) -> dict[str, dict[str, Tensor]]:
    """Return the local fields for this rank, by field and name: its own, or on another number of ranks the mean."""
    everyone = split(state, "local/")
    if same_size:
        mine = everyone.get(str(rank), {})
    else:
        keys = sorted({key for named in everyone.values() for key in named})
        mine = {key: reshard([named[key] for named in everyone.values()], len(everyone)) for key in keys}
    return split(mine, "")


def split(state: Mapping[str, Any], prefix: str) -> dict[str, dict[str, Tensor]]:
    """Return ``prefix<first>/<name>`` keys as {first: {name: tensor}}."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, value in state.items():
        if key.startswith(prefix):
            first, _, name = key[len(prefix) :].partition("/")
            found.setdefault(first, {})[name] = value
    return found


def _resharded(residuals: Mapping[str, Mapping[str, Tensor]], old_size: int, size: int) -> dict[str, Tensor]:
    if residuals and len(residuals) < old_size:
        raise ValueError(
            f"the state holds residuals of {len(residuals)} of {old_size} ranks, but now there are "
            f"{size}: save with thinwire.checkpoint.save, which keeps those of every rank"
        )
    names = sorted({name for named in residuals.values() for name in named})
    mine = {name: reshard([named[name] for named in residuals.values() if name in named], old_size) for name in names}
    if any(x.any() for x in mine.values()):
        before = sum(float(x.norm() ** 2) for named in residuals.values() for x in named.values()) ** 0.5
        after = (size * sum(float(x.norm() ** 2) for x in mine.values())) ** 0.5
        log.warning(
            "thinwire: residuals taken over, saved by %d ranks, now for %d: every rank gets their mean (norm over "
            "ranks %.4g, now %.4g)%s",
            old_size, size, before, after,
            ", and keeps it until there are several ranks again" if size == 1 else "",
        )  # fmt: skip
    return mine


def reshard(residuals: Sequence[Tensor], old_size: int) -> Tensor:
    """Return the mean over the old ranks of one parameter's residual. It keeps the update still owed exactly."""
    return sum(residuals, torch.zeros_like(residuals[0])) / old_size


def check_version(state: Mapping[str, Any]) -> None:
    if state.get("version") != VERSION:
        raise ValueError(f"this is not a thinwire state of version {VERSION}; it says {state.get('version')!r}")
