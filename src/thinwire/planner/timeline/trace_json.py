"""Timelines, real or predicted, as Chrome-trace JSON, which Perfetto and chrome://tracing open.

Complete events ("X") with times in microseconds, one process per rank, one thread per lane.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinwire.planner.timeline.result import LANES, Event


def to_chrome_trace(events: Sequence[Event], rank: int = 0, label: str = "predicted") -> dict[str, Any]:
    """Return the trace of one rank as plain data.

    Args:
        events: events of a timeline; lanes beyond ``LANES`` come after these.
        rank: the process number.
        label: the process name.

    Example:
        >>> trace = to_chrome_trace([Event("AllReduce", "link world", 0.5, 0.25, 3, 1000)])
        >>> trace["traceEvents"][-1]["ts"], trace["traceEvents"][-1]["dur"]
        (500000.0, 250000.0)
    """
    others = sorted({event.lane for event in events} - set(LANES))
    threads = {lane: number for number, lane in enumerate((*LANES, *others))}
    listed = [_metadata("process_name", rank, 0, name=f"{label}, rank {rank}")]
    for lane, thread in threads.items():
        listed.append(_metadata("thread_name", rank, thread, name=lane))
        listed.append(_metadata("thread_sort_index", rank, thread, sort_index=thread))
    for event in events:
        facts = {"bucket": event.bucket, "bytes": event.bytes or None}
        listed.append(
            {
                "name": event.name,
                "cat": event.lane,
                "ph": "X",
                "ts": event.start_seconds * 1e6,
                "dur": event.duration_seconds * 1e6,
                "pid": rank,
                "tid": threads[event.lane],
                "args": {key: value for key, value in facts.items() if value is not None},
            }
        )
    return {"traceEvents": listed, "displayTimeUnit": "ms"}


def write_trace(path: str | os.PathLike[str], events: Sequence[Event], rank: int = 0, label: str = "predicted") -> None:
    """Write a trace to a file."""
    Path(path).write_text(json.dumps(to_chrome_trace(events, rank, label)), encoding="utf-8")


def _metadata(kind: str, rank: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": thread, "args": args}
