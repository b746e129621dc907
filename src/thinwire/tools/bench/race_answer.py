"""The answer of a race: when each row reached the loss, three sentences, the line to write, and the JSON.

Report, plan and ``attach`` read that JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from thinwire.core.words import counted, duration, times
from thinwire.engine.local.settings import local_settings
from thinwire.predict.choose.rank import PAYS, TIE, as_soon, overlap, simplest
from thinwire.tools.bench.race import RaceResult
from thinwire.tools.bench.race_losses import BASE, TimeToLoss
from thinwire.tools.bench.rows import ALONE, EVERY, Row
from thinwire.tools.bench.session import BenchSpec, Point
from thinwire.tools.bench.summary import summarise
from thinwire.tools.bench.words import WITHOUT_A_METHOD, attach_line

LONG = 1000
"""Steps from which on a run is not called short."""


def winner(rows: Sequence[TimeToLoss]) -> TimeToLoss:
    """Return the row that is recommended for all workers."""
    rows = without_alone(rows)
    ddp = next(row for row in rows if row.label == BASE)
    if (rows[0].sooner or 0.0) <= 1 + TIE:
        return ddp
    return simplest(rows[0], [row for row in rows if as_soon(row, rows[0])])


def without_alone(rows: Sequence[TimeToLoss]) -> list[TimeToLoss]:
    return [row for row in rows if row.label != ALONE]


def pays(first: TimeToLoss) -> bool:
    """Return whether all workers with the winner are worth more than one alone, as far as that is known."""
    return first.worth is None or first.worth >= PAYS


def sentences(found: RaceResult) -> tuple[str, str, str]:
    """Say who is first and what all workers are worth then, what that costs in steps, and how certain it is."""
    rows = {row.label: row for row in found.rows}
    if found.needed:
        shortest, step = without_alone(found.rows)[0], duration(rows[BASE].step_seconds)
        return (
            f"{shortest.label} has the shortest step: {duration(shortest.step_seconds)}, DDP's takes {step}",
            "how many steps each method needs is not known: the minutes were over before any was trained",
            f"not sure: --minutes {found.needed} or more are needed to train; the steps timed now are known then",
        )
    first, ddp = winner(found.rows), rows[BASE]
    assert first.seconds is not None
    assert ddp.seconds is not None
    rivals = [row for row in without_alone(found.rows) if row not in (first, ddp) and row.seconds is not None]
    rival = rivals[0] if rivals else None
    sure = _sureness(found, first, ddp, rival)
    if found.budget.steps < LONG:
        sure += "; short runs: over thousands of steps the order may be another one (more --minutes, or --steps 2000)"
    at, machines = f"a loss of {found.target:.3f}", counted(found.asked.workers, "worker")
    after, worth = f"reaches {at} after {duration(first.seconds)}", times(first.worth or 0.0)
    beside = "" if first is ddp or ddp.worth is None else f" (DDP: {times(ddp.worth)})"
    than = "" if first is ddp else f", {first.sooner:.1f} x faster than DDP ({duration(ddp.seconds)})"
    if first.worth is not None:
        than = f"; {machines} are worth {worth} of one alone{beside}"
    alone = ""
    if not pays(first):
        does = "does as well" if (first.worth or 0.0) >= 1 else "is sooner"
        alone = f"one worker alone {does}: {machines} are worth {worth} of it with {first.label}{beside}, which {after}"
    if first is ddp:
        said = "no other method reaches it"
        if rival is not None:
            said = f"{rival.label} reaches it after {duration(rival.seconds or 0.0)}, {rival.sooner:.2f} x"
        return (
            alone or f"DDP is enough here: it {after}, {said}{than}",
            f"it costs no extra steps and no change: a step takes {duration(ddp.step_seconds)}, "
            f"{ddp.over_compute:.2f} times its computing",
            sure,
        )
    return (
        alone or f"{first.label} is first: it {after}{than}",
        f"{_cost(found, first, ddp)}; a step takes {duration(first.step_seconds)} instead of "
        f"{duration(ddp.step_seconds)}",
        sure,
    )


def steps_range(row: TimeToLoss) -> str:
    ends = ["never" if end is None else f"{end:.2f}" for end in (row.fewest_steps, row.most_steps)]
    return ends[0] if ends[0] == ends[1] else " - ".join(ends)


def _cost(found: RaceResult, row: TimeToLoss, ddp: TimeToLoss) -> str:
    if row.label not in found.raced:
        return "it costs no extra steps, as its average is DDP's"
    said = f"it takes {row.steps:.2f} times DDP's steps ("
    said += f"{steps_range(row).replace(' - ', ' to ')} over {row.seeds} seeds" if row.seeds > 1 else "one seed"
    if found.budget.search:
        said += f"; at {row.rate:.3g} x your learning rate, DDP at {ddp.rate:.3g} x"
    return said + ")"


def _sureness(found: RaceResult, first: TimeToLoss, ddp: TimeToLoss, rival: TimeToLoss | None) -> str:
    trained = f"{found.budget.steps} steps a run"
    if first is ddp:
        if rival is None:
            return f"sure: {trained}"
        sure, said = ("not sure", "overlaps") if overlap(rival, ddp) else ("sure", "does not overlap")
        trained = f"{trained}, {_seeds(rival)}" if rival.label in found.raced else trained
        return f"{sure}: the time of {rival.label} {said} with DDP's; {trained}"
    if first.label in found.raced and first.seeds < 2:
        said = "not sure yet: one seed may be luck; give more --minutes, or --seeds 3"
    else:
        spans = f"it took {_span(first)} and DDP {_span(ddp)}"
        said = f"not sure: {spans}, which overlap" if overlap(first, ddp) else f"sure: {spans}, which do not overlap"
    if rival is not None:
        close = "later on every seed" if rival.seeds > 1 else "later"
        if overlap(rival, first):
            tied = as_soon(rival, first) or rival is without_alone(found.rows)[0]
            close = "as fast but less simple" if tied else "whose range overlaps with that"
        said += f"; next is {rival.label}, {duration(rival.seconds or 0.0)}, {close}"
    return f"{said}; {trained}" + (f", {_seeds(first)}" if first.label in found.raced else "")


def _seeds(row: TimeToLoss) -> str:
    return f"{row.seeds} seeds" if row.seeds > 1 else "one seed"


def _span(row: TimeToLoss) -> str:
    low, high = ("never" if end is None else duration(end) for end in (row.least_seconds, row.most_seconds))
    return low if low == high else f"{low} to {high}"


def line_to_write(rows: Sequence[Row], label: str) -> str:
    row = next(row for row in rows if row.label == label)
    if row.kind in WITHOUT_A_METHOD:
        return WITHOUT_A_METHOD[row.kind][1]
    if not row.is_thinwire:
        same = f"keep DDP, or take the same average without a wrapper: {attach_line('ssgd', {})}"
        return same if row.kind == BASE and not row.options else f"take {label}"
    return attach_line(row.kind, row.options)


def curves(found: RaceResult) -> dict[str, list[Point]]:
    """Return the losses over seconds on the link, for seed 0."""
    drawn = {}
    for row in found.rows:
        if (path := found.curves.get(row.label)) is not None and path.steps and row.step_seconds is not None:
            held_out = path.steps[0] == 0  # before the first step no training loss is known
            start = row.start_seconds or 0.0
            drawn[row.label] = [
                Point(step, start * (step > 0) + step * row.step_seconds, loss, loss if held_out else None)
                for step, loss in zip(path.steps, path.losses)
            ]
    return drawn


def planner_row(row: Row) -> dict[str, Any] | None:
    """Return how a row identifies itself in the planner's table (``MeasuredWorth``); None if it has no place there."""
    from thinwire.core.methods.registry import METHODS

    if row.kind == "local":
        settings = local_settings("local", row.pinned)
        every = settings.sync_every
        if settings.outer is not None or not isinstance(every, int) or settings.fragment_sync_delay == "auto":
            return None
        codec = str(row.pinned.get("codec", "int8"))
        code = {"method": "ssgd", "options": {}} if codec == "none" else {"method": "cast", "options": {"dtype": codec}}
        once = {"local": True} if every == 1 else {}
        return code | {"every": every, "delay": settings.delay_in(every), "look": settings.ahead} | once
    if row.kind in ("alone", "accumulate"):
        return {
            "method": row.kind,
            "options": {},
            "every": row.options.get("every", EVERY if row.kind == "accumulate" else 1),
            "delay": 0,
        }
    if row.kind not in METHODS:
        return None
    return None if "look" in row.options else {"method": row.kind, "options": row.options, "every": 1, "delay": 0}


def race_data(found: RaceResult) -> dict[str, Any]:
    """Return the file's content: the result, and what report (``bench``, ``curves``) and plan (``rows``) read of it."""
    asked, measured = found.asked, found.measured
    spec = BenchSpec(model=asked.model, rows=asked.rows, workers=asked.workers, rounds=measured.turns,
                     ranks_per_node=asked.ranks_per_node, link=asked.link, link_bits=asked.link_bits)  # fmt: skip
    bench = summarise(spec, measured.record, emulated=measured.emulated, note=measured.note)
    about = {"elements": bench.parameters, "workers": asked.workers, "steps": found.budget.steps}
    broken = {row.label for row in found.rows if row.note.startswith("failed")}
    planned = []
    for row in asked.rows:
        factor = None if row.label in broken else found.raced.get(row.label)
        if factor is not None and (said := planner_row(row)) is not None:
            planned.append(said | about | {"factors": factor.factors})
    first = None if found.needed else winner(found.rows)
    again = f"the same command with --minutes {found.needed}"
    return {
        "race": {
            "model": asked.model,
            "winner": first and first.label,
            "sentences": sentences(found),
            "next": again if first is None else line_to_write(asked.rows, first.label if pays(first) else ALONE),
            "target": None if found.needed else found.target,
            "ddp_steps": found.budget.steps,
            "budget": asdict(found.budget),
            "rows": [asdict(row) for row in found.rows],
            "finals": {label: {**asdict(one), "way": found.way(label)} for label, one in found.finals.items()},
        },
        "bench": asdict(bench),
        "curves": {label: [asdict(point) for point in points] for label, points in curves(found).items()},
        "rows": planned,
    }
