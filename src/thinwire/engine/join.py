"""Data that end unevenly: a rank whose loop is over answers the others' exchanges until all are done.

With gradients it sends zeros, and before each backward all ranks say who still has data; at the end all take over what
the ranks that went on have made of weights, buffers and optimizers. With local steps it makes empty steps
(``local/sync.py``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.engine.ranks.communicator import Communicator

_CALL = "join()"


class StillTraining:
    """Which ranks still have data, as all say before each backward. ``initial``: averages count those without, too.

    ``all``: whether every rank had some at the last backward.
    """

    def __init__(self, comm: Communicator, *, initial: bool) -> None:
        self._comm, self._initial = comm, initial
        self.ranks: list[int] = []  # at the last backward
        self.all = True
        self._factor: float | None = None

    def told(self, here: bool) -> bool:
        """Say whether this rank goes on; return whether any does."""
        rows = self._comm.gather(bytes([here]), _CALL)
        going = [rank for rank, row in enumerate(rows) if row[0]]
        self._factor = 1.0 if self._initial or not going else len(rows) / len(going)
        self.ranks, self.all = going or self.ranks, len(going) == len(rows)
        return bool(going)

    def factor(self) -> float:
        """Return by what to multiply the mean over all ranks; to be called by each, before each backward."""
        if self._factor is None:
            self.told(True)
        factor, self._factor = self._factor, None
        assert factor is not None
        return factor


def take_over(
    comm: Communicator, tensors: Iterable[Tensor], optimizers: Sequence[torch.optim.Optimizer], scaler: Any, source: int
) -> None:
    """Give all ranks a rank's tensors, and the states of its optimizers and its scaler. All ranks must call it."""
    comm.broadcast(tensors, source)
    mine = [_described(optimizer) for optimizer in optimizers] if comm.rank == source else None
    scale = scaler.state_dict() if scaler is not None and comm.rank == source else None
    row = json.loads(comm.gather(json.dumps([mine, scale]).encode(), _CALL)[source])
    if scaler is not None:
        scaler.load_state_dict(row[1])
    for optimizer, states in zip(optimizers, row[0], strict=True):
        found = list(_places(optimizer, states))
        sent = [state[name].to(comm.device) for state, name in found]
        comm.broadcast(sent, source)
        for (state, name), x in zip(found, sent):
            state[name].copy_(x)


def _parameters(optimizer: torch.optim.Optimizer) -> Sequence[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _described(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return what is in a state, by parameter: a number, or the tensor's dtype, shape and device."""
    states = [optimizer.state.get(p, {}) for p in _parameters(optimizer)]
    return [
        {
            name: [str(x.dtype).removeprefix("torch."), list(x.shape), x.device.type] if isinstance(x, Tensor) else x
            for name, x in state.items()
        }
        for state in states
    ]


def _places(optimizer: torch.optim.Optimizer, states: Sequence[dict[str, Any]]) -> Iterable[tuple[dict[str, Any], str]]:
    """Yield where the tensors of such a state belong; this rank may not have made a step yet."""
    for p, described in zip(_parameters(optimizer), states, strict=True):
        for name, value in described.items():
            state = optimizer.state[p]
            if not isinstance(value, list):
                state[name] = value
                continue
            dtype, shape, device = value
            if not isinstance(state.get(name), Tensor) or list(state[name].shape) != shape:
                state[name] = torch.empty(
                    shape, dtype=getattr(torch, dtype), device=p.device if device != "cpu" else "cpu"
                )
            yield state, name
