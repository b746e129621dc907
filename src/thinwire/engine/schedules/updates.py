"""What a decoupled step leaves for the next forward: shards of buckets, and which optimizer updates what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from thinwire.core.program import Bucket
from thinwire.core.program.ops import Paused
from thinwire.engine.memory import Memory
from thinwire.engine.schedules.optimizers import OptimizerSnapshot


@dataclass
class DeferredUpdates:
    """What one backward has left: this rank's part of each bucket.

    Attributes:
        memories: of the step's buckets.
        paused: their programs, by bucket.
        inline: the buckets whose programs only receive and copy.
        where: for each parameter, its bucket and its place in it.
        sums: for each bucket, ``Method.sums`` of its method.
    """

    memories: list[Memory]
    paused: Mapping[int, Paused]
    inline: list[int]
    where: list[tuple[int, int]]
    sums: Sequence[Callable[[Sequence[int]], bool]]
    gathering: bool = False
    received: set[int] = field(default_factory=set)

    def bucket(self, index: int) -> Bucket:
        made = self.memories[index].made
        assert made is not None
        return made


@dataclass(eq=False)
class DeferredUpdate:
    """What one optimizer updates of a pending bucket: parameter indices by the number of their group."""

    frozen: OptimizerSnapshot
    groups: dict[int, list[int]]

    @property
    def indices(self) -> list[int]:
        return [i for group in self.groups.values() for i in group]
