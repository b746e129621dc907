"""A plan: which parameters share a bucket, in which order. Plain data: printed, hashed, compared over ranks, pinned."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, ClassVar

from thinwire.core.records import Record

if TYPE_CHECKING:
    from thinwire.core.program.method import Method

SIDE_STREAMS = 2
"""On CUDA, that many consecutive buckets have their own streams: one is compressed while another is sent."""


@dataclass(frozen=True)
class PlanBucket:
    """One bucket.

    Attributes:
        dense: whether it runs plain S-SGD whatever the method.
        kept: number of elements that a sparse method sends of it; 0: as the method's density says.
        collective: how its sum goes over the nodes, for methods with that option; "": as the method says.
        exchange: how sparse messages are exchanged; "": likewise.
    """

    names: tuple[str, ...]
    dense: bool = False
    kept: int = 0
    collective: str = ""
    exchange: str = ""

    def applied(self, method: Method) -> Method:
        """Return the method as this bucket runs it."""
        if not (self.collective or self.exchange):
            return method
        decided = {"collective": self.collective, "exchange": self.exchange}
        known = {f.name for f in fields(method)}  # type: ignore[arg-type]
        changed = {name: value for name, value in decided.items() if value and name in known}
        return replace(method, **changed) if changed else method  # type: ignore[type-var]


@dataclass(frozen=True)
class Plan(Record):
    """Buckets in launch order, one list per phase of the method.

    Attributes:
        phases: ``phases[step % len(phases)]`` is the list in force.
        rule: how it was made, for people.
    """

    called: ClassVar[str] = "a thinwire plan"
    alone: ClassVar[bool] = False  # `thinwire plan --out` tells more

    phases: tuple[tuple[PlanBucket, ...], ...]
    rule: str = field(default="given", compare=False)

    @classmethod
    def of(cls, *phases: Iterable[Iterable[str]], rule: str = "given") -> Plan:
        """Make a plan from plain lists of names."""
        return cls(tuple(tuple(PlanBucket(tuple(names)) for names in phase) for phase in phases), rule)

    def buckets(self, step: int = 0) -> tuple[PlanBucket, ...]:
        """Return the buckets in force at a step."""
        return self.phases[step % len(self.phases)]

    def names(self) -> tuple[str, ...]:
        """Return all parameter names, in launch order."""
        return tuple(name for bucket in self.phases[0] for name in bucket.names)

    def check(self, names: Iterable[str]) -> None:
        """Raise ``ValueError`` unless every phase covers exactly these names, each once."""
        wanted = sorted(names)
        for phase in self.phases:
            have = sorted(name for bucket in phase for name in bucket.names)
            if have != wanted:
                missing, extra = sorted(set(wanted) - set(have))[:3], sorted(set(have) - set(wanted))[:3]
                raise ValueError(
                    f"the plan does not fit the model: missing {missing or 'nothing'}, unknown {extra or 'nothing'}"
                    + ("" if missing or extra else ", some names appear twice")
                )

    @property
    def hash(self) -> str:
        """A short digest of what is run (the rule's text does not count)."""
        return hashlib.blake2b(repr(self.phases).encode(), digest_size=8).hexdigest()
