"""The end of a run: by itself, after a rank failed, when time is up, or when the lab is told to stop."""

from __future__ import annotations

import math
import signal
import time

from thinwire.lab.ranks import RankProcesses
from thinwire.lab.signals import DeferredSignals
from thinwire.lab.timeline import FaultTimeline

TIMED_OUT = 124
_TICK_SECONDS = 0.05
_KILL_AFTER_SECONDS = 5.0


def supervise(
    ranks: RankProcesses,
    signals: DeferredSignals,
    timeline: FaultTimeline,
    *,
    grace_seconds: float,
    timeout_seconds: float | None,
) -> int:
    """Wait until all ranks have ended, and make sure that they do.

    When a rank fails, the others have `grace_seconds` to notice, then get SIGTERM, and five seconds later SIGKILL. When
    time is up or a signal arrived, they get SIGTERM at once; on a second signal SIGKILL. A death caused by the timeline
    is not a failure.

    Returns:
        The worst exit code among the ranks that ended by themselves; 124 if time was up.
    """
    began = time.monotonic()
    terminate_at = kill_at = math.inf
    by_itself: list[int | None] = []
    timed_out = terminated = False
    while ranks.running or (timeline.all_dead_for_now and not terminated):
        ranks.step(_TICK_SECONDS)
        now = time.monotonic()
        if not terminated:
            timeline.until(now)
        if any(timeline.unasked(ranks.exit_codes)):
            terminate_at = min(terminate_at, now + grace_seconds)
        if signals.received is not None:
            terminate_at = min(terminate_at, now)
        ended = not ranks.running and not timeline.all_dead_for_now
        if timeout_seconds is not None and now - began >= timeout_seconds and not terminated and not ended:
            timed_out, terminate_at = True, now
        if now >= terminate_at and not terminated:
            terminated, kill_at = True, now + _KILL_AFTER_SECONDS
            by_itself = timeline.unasked(ranks.exit_codes)
            ranks.signal(signal.SIGTERM)
        if now >= kill_at or signals.count > 1:
            ranks.signal(signal.SIGKILL)
    if timed_out:
        return TIMED_OUT
    codes = by_itself if terminated else timeline.unasked(ranks.exit_codes)
    return max((code or 0 for code in codes), default=0)
