"""Time to a loss: rows train side by side, in turns, from the same weights on the same data, each until it is there."""

from __future__ import annotations

import math

from thinwire.bench.curves import judge
from thinwire.bench.record import Point
from thinwire.bench.rows import COMPUTE, Row
from thinwire.bench.spec import BenchSpec
from thinwire.bench.turns import Track, Turns, say


def race(spec: BenchSpec, rows: tuple[Row, ...], tracks: list[Track], turns: Turns) -> None:
    """Turns of ``spec.every`` steps until a row's held-out loss is at most ``spec.target`` or it made ``spec.steps``.

    A row's seconds are all of its training: also the first steps, and those in which a plan is measured. What does not
    count is building it and judging it. The row without exchange takes ``spec.rounds`` turns: it is there to be timed.
    """
    for row, track in zip(rows, tracks):
        turns.build(spec, row, track)
        _note(track, turns)
    running = [track for track in tracks if track.contender is not None]
    while running:
        for track in running:
            turns.run(track, min(spec.every, spec.steps - len(track.record.losses)), 0)
            _note(track, turns)
        running = [track for track in running if not _done(spec, track)]
    for track in tracks:
        if track.contender is not None:
            track.contender.close()


def seconds_of(track: Track) -> float:
    """Seconds of training so far, the slowest rank's in every step."""
    return track.record.untimed_seconds + sum(track.record.step_seconds)


def seconds_to(curve: list[Point], target: float) -> float | None:
    """When a curve first is at or below a loss, linear between points; None if it never is."""
    start, above = 0.0, math.nan  # of the point before: its seconds and its loss
    for point in curve:
        loss = point.loss if point.validation is None else point.validation
        if loss <= target:
            share = 1.0 if math.isnan(above) else (above - target) / (above - loss)
            return start + (point.seconds - start) * share
        start, above = point.seconds, loss
    return None


def _note(track: Track, turns: Turns) -> None:
    """One more point of the row's curve."""
    if track.contender is None or track.record.kind == COMPUTE:
        return
    record = track.record
    validation = judge(track, turns)
    if track.contender is None:
        return
    recent = record.losses[record.curve[-1].step :] if record.curve else []
    loss = sum(recent) / len(recent) if recent else float("nan")
    record.curve.append(Point(len(record.losses), seconds_of(track), loss, validation))
    say(turns.rank, row=record.label, steps=len(record.losses), validation=validation)


def _done(spec: BenchSpec, track: Track) -> bool:
    if track.contender is None:
        return True
    record = track.record
    if record.kind == COMPUTE:
        return len(record.losses) >= min(spec.steps, spec.rounds * spec.every)
    assert spec.target is not None
    last = record.curve[-1]
    reached = (last.loss if last.validation is None else last.validation) <= spec.target
    return reached or len(record.losses) >= spec.steps
