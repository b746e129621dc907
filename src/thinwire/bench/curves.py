"""Loss against seconds: every row trains by itself, from the same weights on the same data."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from thinwire.bench.record import Point
from thinwire.bench.rows import COMPUTE, Row
from thinwire.bench.spec import BenchSpec
from thinwire.bench.turns import Track, Turns, say

COMPUTE_STEPS = 4


def draw_curves(spec: BenchSpec, rows: tuple[Row, ...], tracks: list[Track], turns: Turns) -> None:
    """Each row trains ``spec.steps`` steps; the last, where ``seconds_as``, as long as the first one took."""
    budget: float | None = None
    for index, (row, track) in enumerate(zip(rows, tracks)):
        turns.build(spec, row, track)
        if row.kind == COMPUTE:
            turns.run(track, COMPUTE_STEPS, 1)
            track.contender = None
            continue
        last = spec.seconds_as and index == len(rows) - 1 and budget is not None
        _train(spec, track, turns, budget if last else None)
        if budget is None and track.record.curve:
            budget = track.record.curve[-1].seconds
        if track.contender is not None:
            track.contender.close()
            track.contender = None


def _train(spec: BenchSpec, track: Track, turns: Turns, seconds: float | None) -> None:
    record = track.record
    validation = judge(track, turns)
    clock = 0.0
    if track.contender is not None:
        record.curve.append(Point(0, 0.0, float("nan") if validation is None else validation, validation))
    while track.contender is not None:
        done = len(record.losses)
        # Steps of the row that trains by the clock are short: judged as often, they would wait for their judge.
        if seconds is None:
            chunk = min(spec.every, spec.steps - done)
        else:  # no more than are left, as far as one can tell
            left = (seconds - clock) * done / clock if clock else 1
            chunk = max(1, min(3 * spec.every, math.ceil(left)))
        turns.run(track, chunk, 0)
        if track.contender is None:
            return
        clock = sum(record.step_seconds)
        recent = record.losses[-chunk:]
        record.curve.append(Point(len(record.losses), clock, sum(recent) / chunk, judge(track, turns)))
        say(turns.rank, row=record.label, clock=clock, of=seconds, steps=len(record.losses))
        if (seconds is None and len(record.losses) >= spec.steps) or (seconds is not None and clock >= seconds):
            return


def judge(track: Track, turns: Turns) -> float | None:
    """Held-out loss, each rank on its own share of the held-out text."""
    if track.contender is None:
        return None
    contender = track.contender
    mine = turns.guarded(track, lambda: (contender.evaluate(turns.rank),))
    if mine is None or mine[0] is None:
        return None
    total = torch.tensor([mine[0]], dtype=torch.float64)
    dist.all_reduce(total, group=turns.control)
    return float(total) / turns.workers
