"""``ResolutionSchedule``: small images first, large ones at the end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import ClassVar

from thinwire.core.checks import check_count
from thinwire.core.records import Record


@dataclass(frozen=True)
class Stage:
    """Some epochs with the same image size (its side, in pixels) and batch (samples per step, over all ranks)."""

    epochs: int
    size: int
    batch: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            check_count(name, value)


@dataclass(frozen=True)
class ResolutionSchedule(Record):
    """Stages, one after the other. At each of ``changes`` the caller makes a new loader, learning rate and plan.

    Example:
        >>> schedule = ResolutionSchedule([Stage(2, 96, 512), Stage(1, 224, 128)])
        >>> schedule.at(1).size, schedule.at(2).size, schedule.epochs, schedule.changes
        (96, 224, 3, (2,))
    """

    called: ClassVar[str] = "a resolution schedule"

    stages: tuple[Stage, ...]

    def __init__(self, stages: Iterable[Stage]) -> None:
        object.__setattr__(self, "stages", tuple(stages))
        if not self.stages:
            raise ValueError("a ResolutionSchedule needs at least one Stage")

    @property
    def epochs(self) -> int:
        return sum(stage.epochs for stage in self.stages)

    @property
    def changes(self) -> tuple[int, ...]:
        """Epochs at which a stage other than the first begins."""
        return tuple(sum(stage.epochs for stage in self.stages[:i]) for i in range(1, len(self.stages)))

    def at(self, epoch: int) -> Stage:
        """Return the stage of an epoch, counted from 0."""
        if not 0 <= epoch < self.epochs:
            raise ValueError(f"epoch {epoch} is not in this schedule of {self.epochs} epochs")
        return self.stages[sum(epoch >= change for change in self.changes)]

    @classmethod
    def dawnbench(cls) -> ResolutionSchedule:
        """Return Alibaba's entry to DAWNBench for ResNet-50 (stanford-futuredata/dawn-bench-entries), 28 epochs.

        Its rectangular validation is not included.
        """
        return cls([Stage(13, 96, 32768), Stage(11, 128, 32768), Stage(3, 224, 32768), Stage(1, 288, 16384)])
