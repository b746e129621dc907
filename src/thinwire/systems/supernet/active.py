"""Which gradient elements can be non-zero: known from the sub-networks alone, before any backward."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

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
        """Build a set from slices; every parameter must be named.

        Raises:
            ValueError: a parameter has no entry, or an entry names an unknown parameter.
        """
        if set(shapes) != set(rects):
            raise ValueError(f"rectangles and parameters differ: {sorted(set(shapes) ^ set(rects))[:3]}")
        bounds: dict[str, Bounds | None] = {}
        for name, shape in shapes.items():
            rect = rects[name]
            found = None if rect is None else tuple(s.indices(n)[:2] for s, n in zip(rect, shape, strict=True))
            bounds[name] = found
        return cls(shapes, bounds)

    @classmethod
    def full(cls, shapes: Mapping[str, tuple[int, ...]]) -> ActiveSet:
        """Return the set of all elements of all parameters."""
        return cls(shapes, {name: tuple((0, n) for n in shape) for name, shape in shapes.items()})

    @classmethod
    def union(cls, sets: Sequence[ActiveSet]) -> ActiveSet:
        """Return for each parameter the smallest rectangle that contains those of all sets."""
        if not sets:
            raise ValueError("the union of no sets is not defined")
        bounds: dict[str, Bounds | None] = {}
        for name in sets[0].shapes:
            found = [b for s in sets if (b := s.bounds[name]) is not None]
            bounds[name] = (
                tuple((min(lo for lo, _ in sides), max(hi for _, hi in sides)) for sides in zip(*found))
                if found
                else None
            )
        return cls(sets[0].shapes, bounds)

    @property
    def elements(self) -> int:
        """Number of elements in the rectangles."""
        return sum(prod(hi - lo for lo, hi in b) for b in self.bounds.values() if b is not None)

    @property
    def share(self) -> float:
        """Share of all elements that the rectangles contain."""
        return self.elements / sum(prod(shape) for shape in self.shapes.values())

    @property
    def is_full(self) -> bool:
        """Whether the rectangles contain all elements."""
        return self.elements == sum(prod(shape) for shape in self.shapes.values())

    def rect(self, name: str) -> Rect:
        """Return the slices of a parameter; None: not used."""
        bounds = self.bounds[name]
        return None if bounds is None else tuple(slice(lo, hi) for lo, hi in bounds)

    def whole(self, name: str) -> bool:
        """Return whether the rectangle is the whole parameter."""
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
