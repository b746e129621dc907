"""The state of a KFAC as a flat dict, and back, also on another number of ranks.

Keys: ``factor/<factor>`` and ``updates/<factor>`` (equal on all ranks that have them), ``inverse/<factor>`` (packed as
it is sent) and plain values. Buckets are saved only within ``plan``; damping is not saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.core.kernels.symmetric import pack_upper, unpack_upper
from thinwire.core.program import State
from thinwire.systems.kfac.inversion import Inverses
from thinwire.systems.kfac.plan import KFACPlan
from thinwire.systems.kfac.programs import FACTOR, UPDATES

VERSION = 1


def to_state_dict(state: State, inverses: Inverses, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return this rank's state. ``values``: plain values, kept as they are."""
    plan = inverses.plan
    flat: dict[str, Any] = {"version": VERSION, "plan": plan.to_json(), **values}
    for (field, name), value in state.fields.items():
        flat[f"{field}/{name}"] = value.detach().clone()
    for name, inverse in inverses.of.items():
        flat[f"inverse/{name}"] = inverse.clone() if plan.method == "eigen" else pack_upper(inverse)
    return flat


def from_state_dict(state: State, inverses: Inverses, saved: Mapping[str, Any], device: torch.device) -> bool:
    """Load a state. Return whether all inverses are there; if not, they must be computed again.

    Raises:
        ValueError: it has another version or other layers, or lacks a factor that this rank needs.
    """
    plan = inverses.plan
    if saved.get("version") != VERSION:
        raise ValueError(f"this is not a K-FAC state of version {VERSION}; it says {saved.get('version')!r}")
    old = KFACPlan.from_json(saved["plan"])
    if old.layers != plan.layers:
        differ = sorted({x.name for x in {*old.layers} ^ {*plan.layers}})
        raise ValueError(f"the K-FAC state has other layers than the model: see {', '.join(differ[:3])}")
    everything = [plan.factor(item) for item in range(len(plan.owners))]
    items = [i for i in range(len(plan.owners)) if plan.exchange or plan.mine(i // 2, state.rank)]
    needed = [plan.factor(item) for item in items]
    missing = [name for name in needed if f"factor/{name}" not in saved]
    if missing and any(key.startswith("factor/") for key in saved):
        raise ValueError(
            f"the K-FAC state lacks the factor {missing[0]}: save with thinwire.checkpoint.save, which keeps those of "
            "every rank"
        )
    state.drop_step()
    state.fields = {
        (field, name): saved[f"{field}/{name}"].to(device, copy=True)
        for name in needed
        for field in (FACTOR, UPDATES)
        if f"{field}/{name}" in saved
    }
    found: dict[str, Tensor] = {}
    for name in everything:
        row = saved.get(f"inverse/{name}")
        if row is not None and old.method == plan.method:
            row = row.to(device)
            found[name] = row.clone() if plan.method == "eigen" else unpack_upper(row)
    same = old.world_size == plan.world_size and old.owners == plan.owners
    held = {plan.factor(i) for i in range(len(plan.owners)) if plan.mine(i // 2, state.rank)}
    inverses.of = {name: inverse for name, inverse in found.items() if name in held}
    return (same and old.method == plan.method) or len(found) == len(everything)
