"""Checks of the arguments of ``simulate``, before anything is created."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from thinwire.systems.federated.state import ClientStateStore


def check_numbers(
    rounds: int, clients_per_round: int, population: int, evaluate_every: int | None, checkpoint_every: int
) -> None:
    """Raise ``ValueError`` for a number out of range."""
    if rounds < 1:
        raise ValueError(f"rounds={rounds} must be at least 1")
    if population < 1:
        raise ValueError("there are no clients")
    if not 1 <= clients_per_round <= population:
        raise ValueError(
            f"clients_per_round={clients_per_round} must be between 1 and the number of clients, {population}"
        )
    if evaluate_every is not None and evaluate_every < 0:
        raise ValueError(f"evaluate_every={evaluate_every} must not be negative")
    if checkpoint_every < 1:
        raise ValueError(f"checkpoint_every={checkpoint_every} must be at least 1")


def use_ranks(backend: str, devices: int | None, speeds: Any, faults: Any) -> bool:
    """Return whether the run uses the ranks of the process group.

    Raises:
        ValueError: the options do not match.
    """
    if backend not in ("auto", "inprocess", "ranks"):
        raise ValueError(f"backend={backend!r} is unknown; use auto, inprocess or ranks")
    joined = dist.is_available() and dist.is_initialized()
    if backend == "ranks" and not joined:
        raise ValueError("backend='ranks' needs a process group: start with torchrun and init_process_group")
    ranks = backend == "ranks" or (backend == "auto" and joined)
    if devices is not None and devices < 1:
        raise ValueError(f"devices={devices} must be at least 1")
    if ranks and devices not in (None, dist.get_world_size()):
        raise ValueError(
            f"devices={devices} with {dist.get_world_size()} ranks: leave it out, as each rank is a device"
        )
    if ranks and (speeds is not None or faults):
        raise ValueError("speeds= and faults= are for emulated devices: use backend='inprocess'")
    return ranks


def make_store(
    state: ClientStateStore | str | os.PathLike[str] | None, folder: Path | None, population: int, *, shared: bool
) -> ClientStateStore:
    """Return the store of a run: the user's, or one next to the checkpoint, or a temporary one.

    Raises:
        ValueError: it is for another population, or ranks do not share it.
    """
    if isinstance(state, ClientStateStore):
        if state.population != population:
            raise ValueError(f"the state store is for {state.population} clients, but the population has {population}")
        store = state
    else:
        place = Path(state) if state is not None else None if folder is None else folder / "states"
        store = ClientStateStore(population, place)
    if shared:
        if store.temporary:
            raise ValueError(
                "several ranks need a shared folder for the clients' states: give state= or checkpoint_dir="
            )
        store.write_through = True
    return store
