"""Chrome traces, predicted or measured, as one rank's events on the simulator's lanes."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from thinwire.predict.timeline import LANES, Event
from thinwire.predict.timeline.result import COMPUTE, EXCHANGE_CPU, METHOD, exposed_seconds
from thinwire.tools.report.fields import Data, number, table, text

_RANGE = re.compile(r"thinwire::(?P<phase>[^:]+)::(?P<bucket>\d+)")
_STEP = re.compile(r"ProfilerStep#\d+")
_EXCHANGES = ("allreduce", "reducescatter", "allgather", "alltoall", "broadcast", "exchange")
_GAP = 0.002  # of the whole length: closer events are drawn as one bar


@dataclass(frozen=True)
class StepTrace:
    """One step of the first of ``ranks`` in a file, events from zero; of ``steps``, the first or the last marked."""

    name: str
    label: str
    predicted: bool
    rank: int | None
    ranks: int
    steps: int
    events: tuple[Event, ...]

    @property
    def step_seconds(self) -> float:
        return max((event.end_seconds for event in self.events), default=0.0)

    @property
    def exposed(self) -> float | None:
        """Communication while nothing is computed; None if there is no compute lane or a lane is unknown."""
        lanes = {event.lane for event in self.events}
        return exposed_seconds(self.events) if COMPUTE in lanes and lanes <= set(LANES) else None

    @property
    def bytes_by_bucket(self) -> dict[int, int]:
        sent: dict[int, int] = defaultdict(int)
        for event in self.events:
            if event.bucket is not None and event.bytes:
                sent[event.bucket] += event.bytes
        return dict(sorted(sent.items()))

    @property
    def bars(self) -> list[Event]:
        return joined(self.events, _GAP * self.step_seconds)


def read_trace(name: str, data: Any) -> StepTrace:
    """Read a trace of ``to_chrome_trace`` or ``torch.profiler``; of several steps marked by the profiler, the last."""
    listed = data["traceEvents"] if isinstance(data, dict) else data
    entries = [table(entry, "a trace event") for entry in listed]
    spans = [e for e in entries if e.get("ph") == "X" and e.get("dur") is not None]
    process, threads = _names(entries)
    ranges = [e for e in spans if _RANGE.match(text(e, "name"))]
    steps = [e for e in spans if _STEP.match(text(e, "name"))]
    if steps:
        last = max(steps, key=lambda e: number(e, "ts"))
        first, end = number(last, "ts"), number(last, "ts") + number(last, "dur")
        inside = [e for e in ranges or spans if e not in steps and first <= number(e, "ts") < end]
    else:
        inside = ranges or spans
    pids = sorted({e.get("pid") for e in inside}, key=lambda pid: (not isinstance(pid, int), str(pid).zfill(12)))
    chosen = [e for e in inside if e.get("pid") == pids[0]] if pids else []
    start = min((number(e, "ts") for e in chosen), default=0.0)
    events = [_event(e, start, threads) for e in chosen]
    who = process.get(pids[0], "") if pids else ""
    rank = int(found[1]) if (found := re.search(r"rank (\d+)", who)) else None
    predicted = "predicted" in f"{who} {name}".lower()
    label = "predicted" if predicted else "measured"
    if who.startswith(label):
        label = re.sub(r",? *rank \d+$", "", who)
    starts = _starts(events)
    first_step = [e for e in events if len(starts) < 2 or e.start_seconds < starts[1]]
    return StepTrace(
        name, label, predicted, rank, len(pids), max(len(starts), len(steps)), tuple(outermost(first_step))
    )


def _starts(events: Iterable[Event]) -> list[float]:
    """Return when each step begins: at a forward after a backward. The simulator writes one step per phase."""
    starts, gone_back = [0.0], False
    for event in sorted(events, key=lambda e: e.start_seconds):
        if gone_back and event.name.startswith("forward"):
            starts.append(event.start_seconds)
        gone_back = event.name.startswith("backward") or (gone_back and not event.name.startswith("forward"))
    return starts


def _names(entries: Sequence[Data]) -> tuple[dict[Any, str], dict[tuple[Any, Any], str]]:
    process: dict[Any, str] = {}
    threads: dict[tuple[Any, Any], str] = {}
    for entry in entries:
        if entry.get("ph") == "M":
            name = str(table(entry.get("args") or {}, "'args'").get("name", ""))
            if entry.get("name") == "process_name":
                process[entry.get("pid")] = name
            elif entry.get("name") == "thread_name":
                threads[entry.get("pid"), entry.get("tid")] = name
    return process, threads


def _event(entry: Data, start: float, threads: dict[tuple[Any, Any], str]) -> Event:
    args = table(entry.get("args") or {}, "'args'")
    name, lane = text(entry, "name"), threads.get((entry.get("pid"), entry.get("tid")), f"thread {entry.get('tid')}")
    bucket = args.get("bucket")
    if found := _RANGE.match(name):
        name, bucket = found["phase"], int(found["bucket"])
        lane = _lane(name)
    sent = args.get("bytes")
    return Event(
        name=name,
        lane=lane,
        start_seconds=(number(entry, "ts") - start) / 1e6,
        duration_seconds=max(0.0, number(entry, "dur") / 1e6),
        bucket=bucket if isinstance(bucket, int) else None,
        bytes=int(sent) if isinstance(sent, (int, float)) and math.isfinite(sent) else 0,
    )


def _lane(phase: str) -> str:
    word = re.sub(r"[^a-z]", "", phase.lower())
    if word in _EXCHANGES:
        return "link world"
    return COMPUTE if word in ("forward", "backward", "optimizer") else METHOD


def outermost(events: Iterable[Event]) -> list[Event]:
    kept: list[Event] = []
    ends: dict[str, float] = {}
    for event in sorted(events, key=lambda e: (e.start_seconds, -e.duration_seconds)):
        if event.end_seconds > ends.get(event.lane, -1.0):
            kept.append(event)
            ends[event.lane] = event.end_seconds
    return kept


def joined(events: Iterable[Event], gap: float) -> list[Event]:
    """Join neighbours of one lane, bucket and kind (the first word of the name)."""
    whole: list[Event] = []
    last: dict[str, int] = {}
    for event in events:
        at = last.get(event.lane)
        before = whole[at] if at is not None else None
        if before and _same(before, event) and event.start_seconds - before.end_seconds <= gap and at is not None:
            length = event.end_seconds - before.start_seconds
            kind = event.name if event.name == before.name else event.name.split(" ")[0]
            whole[at] = replace(before, name=kind, duration_seconds=length, bytes=before.bytes + event.bytes)
        else:
            last[event.lane] = len(whole)
            whole.append(event)
    return whole


def _same(one: Event, other: Event) -> bool:
    if one.bytes or other.bytes or EXCHANGE_CPU in (one.name, other.name):
        return False
    return one.bucket == other.bucket and one.name.split(" ")[0] == other.name.split(" ")[0]
