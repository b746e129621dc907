"""Statistics of a GradientSync, as plain data."""

from __future__ import annotations

import dataclasses
import textwrap
from dataclasses import dataclass, field
from typing import Any

from thinwire.core.tcp_info import LONG_SECONDS, Wire
from thinwire.core.words import counted, duration, volume


@dataclass(frozen=True)
class BucketStats:
    """One bucket of the plan in force.

    Attributes:
        names: its parameters. elements: their number of elements. dense: whether it runs S-SGD whatever the method.
        bytes_per_step: bytes this rank sends for it in this phase, by the ring formulas.
    """

    names: tuple[str, ...]
    elements: int
    dense: bool
    bytes_per_step: int


@dataclass(frozen=True)
class Stats:
    """Counters since ``attach``; bytes are one rank's share of a ring. As text, each line is one fact.

    Attributes:
        method: what runs. note: why it is not what was asked for, if so. world_size: ranks. rank: this one.
        steps: synchronised backwards. rejected_steps: those with a non-finite value, whose state was not kept.
        dropped_steps: those whose gradients no optimizer used, of methods with residuals; their state was not kept.
        bytes_sent: by this rank. dense_bytes: what S-SGD in the gradients' dtype would have sent.
        exposed_seconds: time that backward and, with a decoupled method, the forward waited for communication.
        deferred_seconds: the forward's share of it. rebuilt: whether the plan follows the order of arrival.
        collectives, bytes_by_kind: by kind of op. buckets: the plan in force.
        settled: whether the plan in force is the result of the measurements, or nothing was to be measured.
        why: the reasons for the plan, if it was measured.
        wire: the longest wire to another rank, if its round trip takes milliseconds.
        lost_residual_norm: norm of residuals lost with replicas that left; None: a replica that left did not report it.
    """

    method: str
    note: str
    world_size: int
    steps: int = 0
    rejected_steps: int = 0
    dropped_steps: int = 0
    bytes_sent: int = 0
    dense_bytes: int = 0
    exposed_seconds: float = 0.0
    deferred_seconds: float = 0.0
    rebuilt: bool = False
    collectives: dict[str, int] = field(default_factory=dict)
    bytes_by_kind: dict[str, int] = field(default_factory=dict)
    buckets: tuple[BucketStats, ...] = ()
    settled: bool = True
    rank: int = 0
    why: tuple[str, ...] = ()
    lost_residual_norm: float | None = 0.0
    wire: Wire | None = None

    def __str__(self) -> str:
        lost = {"rejected": self.rejected_steps, "without an optimizer's step": self.dropped_steps}
        said = [f"{count} {what}" for what, count in lost.items() if count]
        times = self.dense_bytes / self.bytes_sent if self.bytes_sent else 1.0
        more = f", {times:.3g} times as much" if times != 1 else ""
        each = f", {duration(self.exposed_seconds / self.steps)} a step" if self.steps else ""
        facts = [
            ("method:", self.method),
            *(("", fact) for text in (self.note, *self.why) if text for fact in text.split("; ")),
            ("steps:", ", ".join([f"{self.steps} on {counted(self.world_size, 'rank')}", *said])),
            ("sent:", f"{volume(self.bytes_sent)} by rank {self.rank}"),
            *([("exact:", volume(self.dense_bytes) + more)] if self.dense_bytes else ()),
            ("waited:", f"{duration(self.exposed_seconds)} for communication{each}"),
            ("wire:", str(self.wire) if self.wire else f"round trip under {1e3 * LONG_SECONDS:g} ms"),
        ]
        return "\n".join(
            textwrap.fill(text, 100, initial_indent=f"{name:<8}", subsequent_indent=" " * 10) for name, text in facts
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dataclasses.asdict(self)
