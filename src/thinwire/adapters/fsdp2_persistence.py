"""The state of a ReplicaSync as a flat dict that DCP can store, and back.

Residuals are tensors sharded like their parameters, one set per replica, so DCP cuts them anew for another number of
shards. What the replicas share (factors) belongs to one shard's rows: under another number of shards it is drawn anew.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from thinwire.engine.persistence import VERSION, blank, check_scaled, counted, saved_options, scaled, split

if TYPE_CHECKING:
    from thinwire.adapters.fsdp2_replicas import ReplicaSync

log = logging.getLogger("thinwire")


def _options(sync: ReplicaSync) -> str:
    """The options that factors depend on; buckets are FSDP2's."""
    options = sync.method.options().items()
    return json.dumps({key: str(value) for key, value in options if key != "fusion"}, sort_keys=True)


def _shard(sync: ReplicaSync) -> str:
    """This rank's place in its replica, and of how many."""
    return f"{dist.get_rank(sync.shards)}of{dist.get_world_size(sync.shards)}"


def to_state_dict(sync: ReplicaSync) -> dict[str, Any]:
    """What this rank remembers, with zeros for what it will: DCP fills only the keys that it is shown."""
    flat: dict[str, Any] = {
        "version": VERSION,
        "method": sync.method.name,
        "options": _options(sync),
        "step": sync.state.step,
        "replicas": sync.topology.world_size,
        **scaled(sync.scaler),
    }
    pieces, snapshot, rank = sync.pieces, sync.state.snapshot(), sync.rank
    flat |= counted(snapshot)
    local = [(name, piece.parameter.to_local()) for name, piece in pieces.items()]
    for key, value in blank(sync.method, local, sync.topology, rank).items():
        kind, _, rest = key.partition("/")
        if kind == "shared":
            field, _, name = rest.partition("/")
            known = snapshot["shared"].get(field, {}).get(name)
            flat[f"shared/{_shard(sync)}/{field}/{name}"] = value if known is None else known
            continue
        _, _, rest = rest.partition("/")  # the rank
        field, _, name = rest.partition("/") if kind == "local" else ("", "", rest)
        named = snapshot["residual"] if kind == "residual" else snapshot["local"].get(field, {})
        known = named.get(name, value)
        flat[_key(kind, rank, field, name)] = pieces[name].sharded(known.to(value.device))
    return flat


def _key(kind: str, rank: int, field: str, name: str) -> str:
    return "/".join(filter(None, (kind, str(rank), field, name)))


def from_state_dict(sync: ReplicaSync, saved: Mapping[str, Any]) -> None:
    """Restore; see ``ReplicaSync.load_state_dict``."""
    if saved.get("version") != VERSION or "replicas" not in saved:
        raise ValueError(f"this is not the state of a thinwire ReplicaSync, version {VERSION}")
    if saved["method"] != sync.method.name:
        raise ValueError(
            f"the state was saved by {saved['method']!r} but {sync.method.name!r} is attached; attach the same method, "
            "or start without this state (what was owed to the model is then lost)"
        )
    check_scaled(saved, sync.scaler)
    old, new = int(saved["replicas"]), sync.topology.world_size
    if old != new:
        raise ValueError(
            f"the state is of {old} replicas, but now there are {new}: keep their number (that of the shards may "
            "change), or start without this state (what was owed to the model is then lost)"
        )
    pieces = sync.pieces
    residuals = _local(split(saved, "residual/").get(str(sync.rank), {}))
    if unknown := sorted(set(residuals) - set(pieces)):
        raise ValueError(f"the state has residuals of {unknown[0]}, which the model has not: another model saved it")
    fields = {field: _local(named) for field, named in _fields(saved, f"local/{sync.rank}/").items()}
    shared = {  # a blank one was never committed, or is of other shards
        field: {name: value for name, value in named.items() if value.any()}
        for field, named in _fields(saved, f"shared/{_shard(sync)}/").items()
    }
    drawn = any(named for named in shared.values())
    if drawn and saved_options(saved["options"], sync.method) != json.loads(_options(sync)):
        log.warning("thinwire: the method's options changed; factors are drawn anew, residuals are kept")
        shared = {}
    elif shared and not drawn and int(saved["step"]):
        log.warning("thinwire: the shards are cut otherwise; factors are drawn anew, residuals are kept")
    sync.state.restore(
        {
            "step": saved["step"],
            "dropped": saved.get("dropped", 0),
            "residual": residuals,
            "shared": shared,
            "local": fields,
        }
    )


def _fields(saved: Mapping[str, Any], prefix: str) -> dict[str, dict[str, Tensor]]:
    return split({key: value for key, value in saved.items() if key.startswith(prefix)}, prefix)


def _local(named: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: x.to_local() if isinstance(x, DTensor) else x for name, x in named.items()}
