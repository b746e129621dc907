"""Record the real timeline of some steps, on the simulator's lanes, so that both can be opened side by side."""

from __future__ import annotations

import time
from typing import Any

from thinwire.core.program.ops import Scope
from thinwire.predict.timeline import Event


class Recorder:
    """Collects events with their durations. Several threads may add at once.

    On CUDA these are the host's times: when work was issued, not when it ran (use torch.profiler there).
    """

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._events: list[Event] = []
        self._marks: dict[str, float] = {}

    def now(self) -> float:
        """Seconds since the start of the recording."""
        return time.perf_counter() - self._began

    def add(self, name: str, lane: str, start: float, bucket: int | None = None, sent: int = 0) -> None:
        """Add an event that began at ``start`` and ends now."""
        self._events.append(Event(name, lane, start, self.now() - start, bucket, sent))

    def exchange(self, name: str, scope: Scope, start: float, bucket: int, sent: int) -> None:
        """Add an exchange that has completed."""
        self.add(name, f"link {scope.value}", start, bucket, sent)

    def forward_began(self, *_: Any) -> None:
        """Note the start of a forward; a hook of the model."""
        self._marks["forward"] = self.now()

    def forward_ended(self, *_: Any) -> None:
        """Note the end of a forward, and the start of backward; a hook of the model."""
        if "forward" in self._marks:
            self.add("forward", "compute", self._marks.pop("forward"))
            self._marks["backward"] = self.now()

    def backward_ended(self) -> None:
        """Note that all gradients are there."""
        if "backward" in self._marks:
            self.add("backward", "compute", self._marks.pop("backward"))

    @property
    def events(self) -> tuple[Event, ...]:
        """All events, in order of their start."""
        return tuple(sorted(self._events, key=lambda event: event.start_seconds))
