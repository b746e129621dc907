"""The state of a ReplicaSync as a flat dict that DCP can store, and back.

Residuals are tensors sharded like their parameters, one set per replica, so DCP can reshard them for another number of
shards. State that replicas share (factors) belongs to one shard's rows: with another number of shards it is drawn
again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from thinwire.engine.state.persistence import VERSION, blank, from_flat, frozen_since, name_of, to_flat, without

if TYPE_CHECKING:
    from thinwire.adapters.fsdp2_replicas import ReplicaSync

log = logging.getLogger("thinwire")


def _shard(sync: ReplicaSync) -> str:
    """Return this rank's index within its replica, and the number of ranks."""
    return f"{dist.get_rank(sync.shards)}of{dist.get_world_size(sync.shards)}"


def to_state_dict(sync: ReplicaSync) -> dict[str, Any]:
    """Return this rank's state, with zeros for what will be kept later: DCP fills only the keys that it is given."""
    session, pieces = sync.session, sync.pieces
    local = [(name, piece.parameter.to_local()) for name, piece in pieces.items()]
    flat = to_flat(session, blank(session.method, local, session.topology, session.rank), None)
    flat["replicas"] = flat.pop("world_size")
    del flat["rank"]
    found: dict[str, Any] = {}
    for key, value in flat.items():
        kind, _, rest = key.partition("/")
        if kind == "shared":
            found[f"shared/{_shard(sync)}/{rest}"] = value
        elif rest:  # of this replica
            piece = pieces[name_of(key)]
            found[key] = piece.sharded(value.to(piece.parameter.device))
        else:
            found[key] = value
    return found


def from_state_dict(sync: ReplicaSync, saved: Mapping[str, Any]) -> None:
    """Restore the state; see ``ReplicaSync.load_state_dict``."""
    if saved.get("version") != VERSION or "replicas" not in saved:
        raise ValueError(f"this is not the state of a thinwire ReplicaSync, version {VERSION}")
    session = sync.session
    old, new = int(saved["replicas"]), session.state.size
    if old != new and saved["method"] == session.named.name:
        raise ValueError(
            f"the state is from {old} replicas, but now there are {new}: keep their number (that of the shards may "
            "change), or start without this state (the residuals are then lost)"
        )
    flat: dict[str, Any] = {"world_size": old}
    mine = f"shared/{_shard(sync)}/"
    for key, value in saved.items():
        if key.startswith(mine):
            flat["shared/" + key.removeprefix(mine)] = value
        elif not key.startswith("shared/"):
            flat[key] = value.to_local() if isinstance(value, DTensor) else value
    flat = without(flat, frozen_since(sync._model, sync.pieces))
    found = from_flat(session, flat, {name: piece.shape for name, piece in sync.pieces.items()})
    had = any(key.startswith("shared/") for key in saved)
    if had and not any(key.startswith(mine) and value.any() for key, value in saved.items()) and int(saved["step"]):
        log.warning("thinwire: the shards are cut differently; factors are drawn again, residuals are kept")
    session.state.restore(found)
