"""What a method remembers between steps, by parameter name, in two phases.

A program *stages* its new state while the step is still running; when the last bucket has ended, whoever runs the
programs commits everything, if every verdict of the step holds, or nothing. So one overflow on one rank costs one step
and never poisons a residual. The price is a second copy of the residuals while a step is in flight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.program.bucket import Slot, working_dtype
from thinwire.program.topology import Topology


class State:
    """One rank's memory.

    Attributes:
        rank: this rank. size: number of ranks. topology: which rank sits where.
        step: synchronised backwards so far, accepted or not; known on the host, so programs may branch on it.
        lr: the learning rate, where the caller knows it.
    """

    def __init__(self, rank: int, topology: Topology) -> None:
        self.rank = rank
        self.size = topology.world_size
        self.topology = topology
        self.step = 0
        self.lr: float | None = None
        self.residuals: dict[str, Tensor] = {}
        self.fields: dict[tuple[str, str], Tensor] = {}
        self._staged_residuals: dict[str, Tensor] = {}
        self._staged_fields: dict[tuple[str, str], Tensor] = {}
        self._verdicts: list[Tensor] = []

    def residual(self, slot: Slot) -> Tensor:
        """What this rank still owes for a parameter: fp32 (fp64 for fp64), its shape, unscaled; zeros at the start."""
        found = self.residuals.get(slot.name)
        if found is None:
            found = torch.zeros(slot.shape, dtype=working_dtype(slot.dtype), device=slot.device)
            self.residuals[slot.name] = found
        return found

    def shared(self, field: str, name: str) -> Tensor | None:
        """A tensor equal on all ranks (a factor, a query) that was staged under ``field``, or None."""
        return self.fields.get((field, name))

    def stage(self, name: str, residual: Tensor | None = None, shared: Mapping[str, Tensor] | None = None) -> None:
        """Put new state aside until the verdict on the whole step is known."""
        if residual is not None:
            self._staged_residuals[name] = residual
        for field, value in (shared or {}).items():
            self._staged_fields[field, name] = value

    def verdict(self, flag: Tensor) -> None:
        """Say whether what was *received* is finite: a 0-dim bool tensor, equal on all ranks by construction."""
        self._verdicts.append(flag)

    def accepted(self) -> Tensor | None:
        """All verdicts of the step in one 0-dim tensor; None if no program gave one."""
        if not self._verdicts:
            return None
        return torch.stack([v.reshape(()) for v in self._verdicts]).all()

    def end_step(self) -> bool:
        """Commit the staged state if every verdict holds, else drop it. Returns whether it was accepted (host read)."""
        flag = self.accepted()
        accepted = flag is None or flag.device.type == "meta" or bool(flag)
        if accepted:
            self.residuals.update(self._staged_residuals)
            self.fields.update(self._staged_fields)
        self.drop_step()
        self.step += 1
        return accepted

    def end_step_on_device(self) -> None:
        """As ``end_step`` without a host read (CUDA): the choice is a ``torch.where`` on the current stream."""
        flag = self.accepted()
        if flag is not None:
            for name, new in self._staged_residuals.items():
                old = self.residuals.get(name)
                self.residuals[name] = torch.where(flag, new, torch.zeros_like(new) if old is None else old)
            for key, new in self._staged_fields.items():
                old = self.fields.get(key)
                # A field never committed before has no old value; the new one is finite by its kernel's contract.
                self.fields[key] = new if old is None else torch.where(flag, new, old)
        else:
            self.residuals.update(self._staged_residuals)
            self.fields.update(self._staged_fields)
        self.drop_step()
        self.step += 1

    def drop_step(self) -> None:
        """Forget what was staged (after an error)."""
        self._staged_residuals.clear()
        self._staged_fields.clear()
        self._verdicts.clear()

    def snapshot(self) -> dict[str, Any]:
        """Committed state as plain data, cloned: step, residuals by name, shared fields by field and name."""
        shared: dict[str, dict[str, Tensor]] = {}
        for (field, name), value in self.fields.items():
            shared.setdefault(field, {})[name] = value.detach().clone()
        residuals = {name: value.detach().clone() for name, value in self.residuals.items()}
        return {"step": self.step, "residual": residuals, "shared": shared}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Take over a snapshot (tensors are cloned)."""
        self.drop_step()
        self.step = int(snapshot["step"])
        self.residuals = {name: value.clone() for name, value in snapshot["residual"].items()}
        self.fields = {
            (field, name): value.clone() for field, named in snapshot["shared"].items() for name, value in named.items()
        }
