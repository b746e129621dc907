"""A method's state between steps, by parameter name, committed in two phases.

A program *stages* its new state while the step is still running. When the last bucket has ended, the code that runs the
programs accepts everything if every verdict of the step holds, and nothing otherwise. So one overflow on one rank costs
one step and never damages a residual. Accepted state takes effect at once, or is *pending* until an optimizer has used
the gradients: if they are dropped instead, what was held back from them is dropped too. The price is a second copy of
the residuals until then.

There are three kinds of state. *Residuals* and *local* fields (a momentum) are this rank's own: a restart on another
number of ranks gives their mean to every rank. *Shared* fields (a factor) are equal on all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.core.kernels.tables import choose
from thinwire.core.program.bucket import Slot, working_dtype
from thinwire.core.program.ops import in_own_modes
from thinwire.core.program.topology import Topology

Key = tuple[str, str]
"""(field, parameter's name)."""

_UNUSED_STEPS = 16  # steps after which unused memory of a bucket is freed: plans and phases change


def extend(part: Tensor, offset: int, shape: Sequence[int]) -> Tensor:
    """Return a 1-D slice that begins at ``offset`` as a tensor of this shape, with zeros around it."""
    whole = part.new_zeros(torch.Size(shape).numel())
    whole[offset : offset + part.numel()] = part.reshape(-1)
    return whole.view(torch.Size(shape))


@dataclass
class _Kept:
    residuals: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    offsets: dict[str, int] = dataclasses.field(default_factory=dict)  # of residuals that are slices: where they begin
    fields: dict[Key, Tensor] = dataclasses.field(default_factory=dict)
    locals: dict[Key, Tensor] = dataclasses.field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.residuals or self.fields or self.locals)

    @property
    def kinds(self) -> tuple[dict[Any, Any], ...]:
        return self.residuals, self.offsets, self.fields, self.locals

    def clear(self) -> None:
        for kind in self.kinds:
            kind.clear()

    def update(self, other: _Kept) -> None:
        for kind, more in zip(self.kinds, other.kinds):
            kind.update(more)

    def pop(self, names: Container[str]) -> _Kept:
        found = _Kept()
        for kind, taken in zip(self.kinds, found.kinds):
            taken.update({key: kind.pop(key) for key in [*kind] if (key if isinstance(key, str) else key[1]) in names})
        return found


class State:
    """One rank's state.

    Attributes:
        rank: this rank. size: number of ranks. topology: which rank is on which machine.
        step: synchronised backwards so far, accepted or not; known on the host, so programs may branch on it.
        lr: the learning rate, if the caller knows it.
        start: the first step at which the method runs; before it, averages are exact.
        dropped: steps whose state was dropped because no optimizer used their gradients.
        restored: whether a snapshot was taken over.
        held: parameters that are frozen for now: what they are owed is neither sent nor changed.
    """

    def __init__(self, rank: int, topology: Topology) -> None:
        self.rank = rank
        self.size = topology.world_size
        self.topology = topology
        self.step = 0
        self.restored = False
        self.held: Container[str] = ()
        self.lr: float | None = None
        self.start = self.dropped = 0
        self._committed = False  # whether something of the last step was
        self._kept, self._staged, self._pending = _Kept(), _Kept(), _Kept()
        self.residuals, self.offsets = self._kept.residuals, self._kept.offsets
        self.fields, self.locals = self._kept.fields, self._kept.locals
        self._spare: dict[tuple[str, tuple[str, ...]], tuple[int, list[Tensor]]] = {}
        self._verdicts: list[Tensor] = []

    @property
    def turn(self) -> int:
        """Steps without dropped ones. Alternating methods use it, or drops could leave one kind of step out."""
        return self.step - self.dropped

    def residual(self, slot: Slot) -> Tensor:
        """Return a parameter's residual: fp32 (fp64 for fp64), in its shape, unscaled; zeros at the start."""
        return self._own(self.residuals, slot.name, slot)

    def local(self, field: str, slot: Slot) -> Tensor:
        """Return a parameter's local field: this rank's own, of the residual's kind, zeros at the start."""
        return self._own(self.locals, (field, slot.name), slot)

    def _own(self, kept: dict[Any, Tensor], key: object, slot: Slot) -> Tensor:
        found = None if slot.name in self.held else kept.get(key)
        if found is None:
            found = torch.zeros(slot.shape, dtype=working_dtype(slot.dtype), device=slot.device)
            if slot.name not in self.held:
                kept[key] = found
        return found

    def shared(self, field: str, name: str) -> Tensor | None:
        """Return a tensor, equal on all ranks (a factor, a query), that was staged under ``field``, or None."""
        return self.fields.get((field, name))

    def spare(self, slots: Sequence[Slot], field: str | None = None, size: int | None = None) -> Tensor:
        """Return memory for the residual, or local field, that the slots will stage; never the one in force.

        ``size``: number of elements; None: those of all slots.

        On CPUs two buffers take turns: fresh memory costs more (page faults) than all the arithmetic of a step.
        """
        held = [self.residual(s) if field is None else self.local(field, s) for s in slots]
        size, like = sum(s.numel for s in slots) if size is None else size, held[0]
        if like.device.type != "cpu":
            return like.new_empty(size)
        waiting = self.residuals.values() if field is None else self.locals.values()  # some of these are held
        taken = {x.untyped_storage().data_ptr() for x in (*held, *(waiting if self.held else ()))}
        key = (field or "", tuple(s.name for s in slots))
        _, buffers = self._spare.get(key, (0, []))
        self._spare[key] = (self.step, buffers)
        for buffer in buffers:
            fits = buffer.numel() == size and buffer.dtype == like.dtype
            if fits and buffer.untyped_storage().data_ptr() not in taken:
                return buffer
        buffers[:] = [*buffers[-1:], like.new_empty(size)]
        return buffers[-1]

    def stage(
        self,
        name: str,
        residual: Tensor | None = None,
        shared: Mapping[str, Tensor] | None = None,
        local: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Put new state aside until the verdict on the whole step is known."""
        if residual is not None:
            self._staged.residuals[name] = residual
        for field, value in (shared or {}).items():
            self._staged.fields[field, name] = value
        for field, value in (local or {}).items():
            self._staged.locals[field, name] = value

    def slice_of(self, name: str) -> tuple[int, Tensor] | None:
        """Return where a residual that was staged as a slice begins in the flattened parameter, and the slice, 1-D.

        A residual staged whole counts as a slice from 0. None: there is no residual.
        """
        found = None if name in self.held else self.residuals.get(name)
        return None if found is None else (self.offsets.get(name, 0), found.reshape(-1))

    def stage_slice(self, name: str, offset: int, residual: Tensor) -> None:
        """Stage the residual of the 1-D part of a parameter that begins at ``offset``."""
        self._staged.residuals[name] = residual
        self._staged.offsets[name] = offset

    def extended(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return a parameter's residual in this shape; a slice is filled up with zeros (in a new tensor)."""
        found = self.residuals[name]
        return extend(found, self.offsets[name], shape) if name in self.offsets else found

    def verdict(self, flag: Tensor) -> None:
        """Say whether what was *received* is finite: a 0-dim bool tensor, equal on all ranks by construction."""
        self._verdicts.append(flag)

    def accepted(self) -> Tensor | None:
        """Return all verdicts of the step in one 0-dim tensor; None if no program gave one."""
        if len(self._verdicts) < 2:
            return self._verdicts[0].reshape(()) if self._verdicts else None
        return torch.stack([v.reshape(()) for v in self._verdicts]).all()

    def end_step(self, *, hold: bool = False) -> bool:
        """Accept the staged state if every verdict holds, else drop it. Return whether it was accepted (host read).

        ``hold``: accepted state stays pending until ``commit``.
        """
        flag = self.accepted()
        accepted = flag is None or flag.device.type == "meta" or bool(flag)
        if accepted:
            self._accept(hold)
        self._next_step()
        return accepted

    def settle(self) -> None:
        """Commit what programs have staged since the step was counted: in the second half of a decoupled step."""
        step, flag = self.step, self.accepted()
        if flag is not None and flag.device.type == "cuda":
            self.end_step_on_device()
        else:
            self.end_step()
        self.step = step

    def end_step_on_device(self, *, hold: bool = False) -> None:
        """Do as ``end_step`` without a host read (CUDA): the current stream chooses, in what was staged."""
        if self._recut():  # after a change of plan: old and new slices differ
            self.end_step(hold=hold)
            return
        flag, staged, pairs = self.accepted(), self._staged, []
        if flag is not None:
            own: list[tuple[dict[Any, Tensor], dict[Any, Tensor]]]
            own = [(staged.residuals, self.residuals), (staged.locals, self.locals)]
            for kind, held in own:
                pairs += [(new, held[key] if key in held else torch.zeros_like(new)) for key, new in kind.items()]
            # A field never committed before has no old value; the new one is finite, as its kernel guarantees.
            pairs += [(new, self.fields[key]) for key, new in staged.fields.items() if key in self.fields]
        if flag is not None and pairs:
            choose(flag, [new for new, _ in pairs], [old for _, old in pairs])
        self._accept(hold)
        self._next_step()

    def _accept(self, hold: bool) -> None:
        if self.held:
            self._staged.pop(self.held)
        if hold:
            self._committed = False
            self._pending.update(self._staged)
        else:
            self._kept.update(self._staged)

    @property
    def pending(self) -> bool:
        """Whether accepted state waits for ``commit``."""
        return bool(self._pending)

    def commit(self, names: Container[str]) -> None:
        """Put the pending state of these parameters in force."""
        ready = self._pending.pop(names)
        self._committed = self._committed or bool(ready)
        self._kept.update(ready)

    def drop_pending(self) -> None:
        """Drop what is pending, because the gradients that it was held back from were dropped."""
        if self._pending and not self._committed:
            self.dropped += 1
        self._pending.clear()

    def rescale(self, factor: float) -> None:
        """Multiply everything in gradient units, in force or pending, because it was kept in the wrong units."""
        for residuals in (self.residuals, self._pending.residuals):
            residuals.update({name: value * factor for name, value in residuals.items()})
        for local in (self.locals, self._pending.locals):
            local.update({key: value * factor for key, value in local.items()})

    def _next_step(self) -> None:
        self.drop_step()
        self.step += 1
        for key in [key for key, (used, _) in self._spare.items() if used < self.step - _UNUSED_STEPS]:
            del self._spare[key]

    def _recut(self) -> bool:
        """Return whether a staged slice covers another part of its parameter than the committed one."""
        return any(
            name in self.residuals
            and (self.offsets.get(name) != offset or self.residuals[name].shape != self._staged.residuals[name].shape)
            for name, offset in self._staged.offsets.items()
        )

    def drop_step(self) -> None:
        """Drop what was staged (after an error)."""
        self._staged.clear()
        self._verdicts.clear()

    def snapshot(self) -> dict[str, Any]:
        """Return committed state as plain data, cloned: step, residuals by name, fields by field and name."""
        residuals = {name: value.detach().clone() for name, value in self.residuals.items()}
        return {
            "step": self.step,
            "dropped": self.dropped,
            "residual": residuals,
            "offset": dict(self.offsets),
            "shared": _by_field(self.fields),
            "local": _by_field(self.locals),
        }

    @in_own_modes()
    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Take over a snapshot (tensors are cloned). A snapshot may lack local fields."""
        self.drop_step()
        self.drop_pending()
        self._spare.clear()
        self.restored = True
        self.step, self.dropped = int(snapshot["step"]), int(snapshot.get("dropped", 0))
        residuals = {name: value.clone() for name, value in snapshot["residual"].items()}
        fields, own = _by_key(snapshot["shared"]), _by_key(snapshot.get("local", {}))
        found = _Kept(residuals, dict(snapshot.get("offset", {})), fields, own)
        self._kept.clear()
        self._kept.update(found)


def _by_field(fields: Mapping[Key, Tensor]) -> dict[str, dict[str, Tensor]]:
    named: dict[str, dict[str, Tensor]] = {}
    for (field, name), value in fields.items():
        named.setdefault(field, {})[name] = value.detach().clone()
    return named


def _by_key(named: Mapping[str, Mapping[str, Tensor]]) -> dict[Key, Tensor]:
    return {(field, name): value.clone() for field, values in named.items() for name, value in values.items()}
