"""The state of a DDP hook as a flat dict, and back, also on another number of ranks."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from thinwire.engine.persistence import (
    VERSION,
    blank,
    counted,
    local_keys,
    local_of,
    owes,
    reshard,
    saved_options,
    split,
    split_shared,
)
from thinwire.program import Method, State

log = logging.getLogger("thinwire")


def _options(method: Method) -> str:
    """The options that factors depend on; buckets are DDP's."""
    return json.dumps({key: str(value) for key, value in method.options().items() if key != "fusion"}, sort_keys=True)


def to_state_dict(
    state: State, method: Method, compressed: Iterable[tuple[str, Tensor]], source: str
) -> dict[str, Any]:
    """The state of this rank, with blanks for what will be remembered of the compressed parameters known so far.

    Args:
        source: of the names: "ddp" for ordinals, "model".
    """
    snapshot = state.snapshot()
    flat: dict[str, Any] = {
        "version": VERSION,
        "method": method.name,
        "options": _options(method),
        "step": snapshot["step"],
        "world_size": state.size,
        "rank": state.rank,
        "names": source,
        "residuals": len(snapshot["residual"]),
        **counted(snapshot),
    }
    kept = list(compressed)
    if not method.shards:
        flat.update(blank(method, kept, state.topology, state.rank))
    shapes = {name: tuple(p.shape) for name, p in kept}
    for name, value in snapshot["residual"].items():  # a slice with zeros around it: buckets are DDP's
        flat[f"residual/{state.rank}/{name}"] = state.extended(name, shapes[name]).clone() if name in shapes else value
    flat.update(local_keys(snapshot, state.rank))
    for kind, named in snapshot["shared"].items():
        for name, value in named.items():
            flat[f"shared/{kind}/{name}"] = value
    return flat


def from_state_dict(state: State, method: Method, saved: Mapping[str, Any], source: str) -> None:
    """Restore; see ``DDPSync.load_state_dict``."""
    if saved.get("version") != VERSION or saved.get("names") not in ("ddp", "model"):
        raise ValueError(f"this is not the state of a thinwire DDP hook, version {VERSION}")
    if saved["names"] != source:
        raise ValueError(
            "the state and the hook name parameters differently: one is of ddp_hook, which counts them, the other of a "
            "framework's adapter, which knows their names; load the state where it was saved"
        )
    if saved["method"] != method.name and owes(saved):
        raise ValueError(
            f"the state was saved by {saved['method']!r} but the hook runs {method.name!r}; use the same method, or "
            "start without this state (what was owed to the model is then lost)"
        )
    residuals = split(saved, "residual/")
    if not residuals and saved["residuals"]:
        raise ValueError(
            "the state has lost its residuals: DCP fills only what it is shown, and before its first backward a DDP "
            "hook knows no parameters; load it after that, or save each rank's state_dict with torch.save"
        )
    old_size = int(saved["world_size"])
    if old_size == state.size:
        mine = residuals.get(str(state.rank), {})
        if residuals and not mine:
            raise ValueError(f"the state holds no residuals of rank {state.rank}: keep those of every rank")
    else:
        if residuals and len(residuals) < old_size:
            raise ValueError(
                f"the state holds residuals of {len(residuals)} of {old_size} ranks, but now there are {state.size}: "
                "those of every rank are needed"
            )
        names = sorted({name for named in residuals.values() for name in named})
        mine = {
            name: reshard([named[name] for named in residuals.values() if name in named], old_size) for name in names
        }
    local = local_of(saved, state.rank, old_size == state.size)
    shared = split_shared(saved)
    if shared and saved_options(saved["options"], method) != json.loads(_options(method)):
        log.warning("thinwire: the method's options changed; factors are drawn anew, residuals are kept")
        shared = {}
    if state.size == 1:  # kept, not used: what is zero needs no memory
        mine = {name: value for name, value in mine.items() if value.any()}
    state.restore(
        {"step": saved["step"], "dropped": saved.get("dropped", 0), "residual": mine, "shared": shared, "local": local}
    )
