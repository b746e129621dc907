"""Which gradient elements can be other than zero: known from the sub-networks alone, before any backward."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from thinwire.supernet.operators import Rect

Bounds = tuple[tuple[int, int], ...]
"""(first, end) along each dimension."""


@dataclass(frozen=True)
class ActiveSet:
    """One rectangle of each parameter, or nothing of it. It may hold zeros; nothing outside it is ever non-zero.

    Attributes:
        shapes: of all parameters, by name.
        bounds: of their rectangles, by name; None: not used at all.
    """

    shapes: Mapping[str, tuple[int, ...]]
    bounds: Mapping[str, Bounds | None]

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], rects: Mapping[str, Rect]) -> ActiveSet:
        """From slices; every parameter must be named.

        Raises:
            ValueError: a parameter has no rectangle, or there is one of an unknown parameter.
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
        """All of every parameter."""
        return cls(shapes, {name: tuple((0, n) for n in shape) for name, shape in shapes.items()})

    @classmethod
    def union(cls, sets: Sequence[ActiveSet]) -> ActiveSet:
        """Of each parameter the smallest rectangle that holds those of all sets."""
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
        """How many elements the rectangles hold."""
        return sum(prod(hi - lo for lo, hi in b) for b in self.bounds.values() if b is not None)

    @property
    def share(self) -> float:
        """Their share of all elements."""
        return self.elements / sum(prod(shape) for shape in self.shapes.values())

    @property
    def is_full(self) -> bool:
        """Whether they hold everything."""
        return self.elements == sum(prod(shape) for shape in self.shapes.values())

    def rect(self, name: str) -> Rect:
        """The slices of a parameter; None: not used."""
        bounds = self.bounds[name]
        return None if bounds is None else tuple(slice(lo, hi) for lo, hi in bounds)

    def whole(self, name: str) -> bool:
        """Whether the rectangle is the parameter."""
        bounds = self.bounds[name]
        return bounds is not None and all(b == (0, n) for b, n in zip(bounds, self.shapes[name]))

    def hash8(self, step: int) -> bytes:
        """A digest of the step and of all names and bounds, to compare over ranks."""
        digest = hashlib.blake2b(str(step).encode(), digest_size=8)
        for name in sorted(self.bounds):
            digest.update(f"{name}{self.bounds[name]};".encode())
        return digest.digest()

    def participants(self, sets: Iterable[ActiveSet], name: str, like: Tensor) -> Tensor:
        """How many of the sets hold each element of a parameter: a tensor of its shape."""
        count = like.new_zeros(self.shapes[name])
        for other in sets:
            rect = other.rect(name)
            if rect is not None:
                count[rect] += 1
        return count
