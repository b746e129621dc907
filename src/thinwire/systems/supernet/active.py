"""Which gradient elements can be non-zero: known from the sub-networks alone, before any backward."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from thinwire.core.program import Bucket, Slot, State
from thinwire.systems.supernet.operators import Rect

Bounds = tuple[tuple[int, int], ...]
"""(first, end) along each dimension."""


@dataclass(frozen=True)
class ActiveSet:
    """One rectangle of each parameter, or none. It may contain zeros; everything outside it is zero.

    Attributes:
        shapes: of all parameters, by name.
        bounds: of their rectangles, by name; None: the parameter is not used.
    """

    shapes: Mapping[str, tuple[int, ...]]
    bounds: Mapping[str, Bounds | None]

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], rects: Mapping[str, Rect]) -> ActiveSet:
        """Build a set from slices; every parameter must be named."""
        if set(shapes) != set(rects):
            raise ValueError(f"rectangles and parameters differ: {sorted(set(shapes) ^ set(rects))[:3]}")
        bounds: dict[str, Bounds | None] = dict.fromkeys(shapes)
        for name, rect in rects.items():
            if rect is not None:
                bounds[name] = tuple(s.indices(n)[:2] for s, n in zip(rect, shapes[name], strict=True))
        return cls(shapes, bounds)

    @classmethod
    def full(cls, shapes: Mapping[str, tuple[int, ...]]) -> ActiveSet:
        return cls(shapes, {name: tuple((0, n) for n in shape) for name, shape in shapes.items()})

    @classmethod
    def union(cls, sets: Sequence[ActiveSet]) -> ActiveSet:
        """Return for each parameter the smallest rectangle that contains those of all sets."""
        if not sets:
            raise ValueError("the union of no sets is not defined")
        bounds: dict[str, Bounds | None] = {}
        for name in sets[0].shapes:
            found = [b for s in sets if (b := s.bounds[name]) is not None]
            union = tuple((min(lo for lo, _ in sides), max(hi for _, hi in sides)) for sides in zip(*found))
            bounds[name] = union if found else None
        return cls(sets[0].shapes, bounds)

    @property
    def elements(self) -> int:
        return sum(prod(hi - lo for lo, hi in b) for b in self.bounds.values() if b is not None)

    @property
    def share(self) -> float:
        """Share of all elements that the rectangles contain."""
        return self.elements / sum(prod(shape) for shape in self.shapes.values())

    @property
    def is_full(self) -> bool:
        return self.share == 1

    def rect(self, name: str) -> Rect:
        """Return the slices of a parameter; None: not used."""
        bounds = self.bounds[name]
        return None if bounds is None else tuple(slice(lo, hi) for lo, hi in bounds)

    def whole(self, name: str) -> bool:
        bounds = self.bounds[name]
        return bounds is not None and all(b == (0, n) for b, n in zip(bounds, self.shapes[name]))

    def hash8(self, step: int) -> bytes:
        """Return a digest of the step and of all names and bounds, for comparison across ranks."""
        digest = hashlib.blake2b(str(step).encode(), digest_size=8)
        for name in sorted(self.bounds):
            digest.update(f"{name}{self.bounds[name]};".encode())
        return digest.digest()

    def participants(self, sets: Iterable[ActiveSet], name: str, like: Tensor) -> Tensor:
        """Return how many of the sets contain each element of a parameter: a tensor in its shape."""
        count = like.new_zeros(self.shapes[name])
        for other in sets:
            rect = other.rect(name)
            if rect is not None:
                count[rect] += 1
        return count


def pack(bucket: Bucket, active: ActiveSet, buffer: Tensor | None = None) -> Bucket | None:
    """Return a bucket of the active rectangles, in order, each row-major, in ``buffer``; None if there are none."""
    slots = []
    for slot in bucket.slots:
        rect = active.rect(slot.name)
        if rect is None:
            continue
        shape = [s.stop - s.start for s in rect]
        value = None if slot.value is None else slot.value[rect]
        weight = None if slot.weight is None else slot.weight.detach()[rect]
        slots.append(Slot(slot.name, shape, value, slot.dtype, slot.device, weight))
    return Bucket(bucket.index, slots, scale=bucket.scale, buffer=buffer) if slots else None


def unpack(packed: Bucket | None, bucket: Bucket, active: ActiveSet, everyone: Sequence[ActiveSet] = ()) -> None:
    """Deliver the results of a packed bucket (None: nothing was sent); outside the rectangles becomes exactly zero.

    ``everyone``: each rank's set, to divide elements by the number of ranks that use them instead of all ranks.
    """
    made = {} if packed is None else {slot.name: slot for slot in packed.slots}
    for slot in bucket.slots:
        rect = active.rect(slot.name)
        if rect is None:
            if slot.value is not None:
                slot.result = slot.value.zero_()
            continue
        result = made[slot.name].result
        assert result is not None
        whole = slot.value
        if whole is None:
            whole = torch.zeros(slot.shape, dtype=slot.dtype, device=slot.device)
        elif not active.whole(slot.name):
            result = result.clone()  # it may be a view of the gradient
            whole.zero_()
        whole[rect] = result
        if everyone:
            whole *= len(everyone) / active.participants(everyone, slot.name, whole).clamp_min_(1)
        slot.result = whole


class PackedState(State):
    """The state of a packed bucket: active parts of residuals and momenta are cut out, and staged back."""

    def __init__(self, whole: State, active: ActiveSet, slots: Mapping[str, Slot]) -> None:
        super().__init__(whole.rank, whole.topology)
        self.step, self.lr = whole.step, whole.lr
        self._whole, self._active, self._slots = whole, active, slots

    def residual(self, slot: Slot) -> Tensor:
        if slot.name not in self.residuals:
            owed = self._whole.residual(self._slots[slot.name])
            self.residuals[slot.name] = owed[self._active.rect(slot.name)].contiguous()
        return self.residuals[slot.name]

    def local(self, field: str, slot: Slot) -> Tensor:
        key = (field, slot.name)
        if key not in self.locals:
            held = self._whole.local(field, self._slots[slot.name])
            self.locals[key] = held[self._active.rect(slot.name)].contiguous()
        return self.locals[key]

    def stage(
        self,
        name: str,
        residual: Tensor | None = None,
        shared: Mapping[str, Tensor] | None = None,
        local: Mapping[str, Tensor] | None = None,
    ) -> None:
        if shared:
            raise RuntimeError(f"shared state of {name} cannot be packed")
        rect, slot = self._active.rect(name), self._slots[name]
        staged = None
        if residual is not None:
            staged = self._whole.residual(slot).clone()
            staged[rect] = residual.view(staged[rect].shape)
        fields = {}
        for field, value in (local or {}).items():
            fields[field] = self._whole.local(field, slot).clone()
            fields[field][rect] = value.view(fields[field][rect].shape)
        self._whole.stage(name, residual=staged, local=fields)

    def verdict(self, flag: Tensor) -> None:
        self._whole.verdict(flag)
