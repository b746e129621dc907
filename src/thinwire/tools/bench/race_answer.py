"""The answer of a race: three sentences, the line to write, and the JSON that report, plan and ``attach`` read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from thinwire.predict.choose.rank import TIE, as_soon, overlap, simplest
from thinwire.tools.bench.finish import Finish
from thinwire.tools.bench.halving import BASE
from thinwire.tools.bench.race import spoken_for
from thinwire.tools.bench.racing import RaceResult
from thinwire.tools.bench.record import Point
from thinwire.tools.bench.rows import Row
from thinwire.tools.bench.spec import BenchSpec
from thinwire.tools.bench.summary import summarise
from thinwire.tools.bench.table import seconds as short
from thinwire.tools.bench.words import attach_line


def duration(seconds: float) -> str:
    """Format the duration of a training run."""
    if seconds >= 6000:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds:.0f} s" if seconds >= 99.5 else f"{seconds:.1f} s" if seconds >= 10 else short(seconds)


def winner(rows: Sequence[Finish]) -> Finish:
    """Return the simplest of those that are as fast as the fastest; DDP if none is sooner."""
    ddp = next(row for row in rows if row.label == BASE)
    if (rows[0].sooner or 0.0) <= 1 + TIE:
        return ddp
    return simplest(rows[0], [row for row in rows if as_soon(row, rows[0])])


def sentences(found: RaceResult) -> tuple[str, str, str]:
    """Say who is first and how much sooner than DDP, what that costs in steps, and how certain it is."""
    rows = {row.label: row for row in found.rows}
    first, ddp = winner(found.rows), rows[BASE]
    assert ddp.seconds is not None
    assert ddp.step_seconds is not None
    at = f"a loss of {found.target:.3f}"
    if first is ddp:
        others = [row for row in found.rows if row is not ddp and row.seconds is not None]
        rival = f"{others[0].label} reaches it {_told(others[0])}" if others else "no other method reaches it"
        return (
            f"DDP is enough here: it reaches {at} after {duration(ddp.seconds)}, {rival}",
            f"it costs no extra steps and no change: a step takes {short(ddp.step_seconds)}, "
            f"{ddp.over_compute:.2f} times its computing",
            _sureness(found, ddp, others[0] if others else None) + _last_rate(found.budget.rates, ddp.rate),
        )
    assert first.seconds is not None
    assert first.step_seconds is not None
    rivals = [row for row in found.rows if row not in (first, ddp) and row.seconds is not None]
    return (
        f"{first.label} is first: it reaches {at} after {duration(first.seconds)}, "
        f"{first.sooner:.1f} x faster than DDP ({duration(ddp.seconds)})",
        f"{_cost(found, first)}; a step takes {short(first.step_seconds)} instead of {short(ddp.step_seconds)}",
        _sureness(found, first, rivals[0] if rivals else None) + _last_rate(found.budget.rates, ddp.rate),
    )


def _told(row: Finish) -> str:
    assert row.seconds is not None
    return f"after {duration(row.seconds)}, {row.sooner:.2f} x"


def steps_range(row: Finish) -> str:
    """Format the range over seeds."""
    ends = ["never" if end is None else f"{end:.2f}" for end in (row.fewest_steps, row.most_steps)]
    return ends[0] if ends[0] == ends[1] else " - ".join(ends)


def _cost(found: RaceResult, row: Finish) -> str:
    if row.label not in found.raced:
        return "it costs no extra steps, as its average is DDP's"
    said = f"it takes {row.steps:.2f} times DDP's steps ("
    said += f"{steps_range(row).replace(' - ', ' to ')} over {row.seeds} seeds" if row.seeds > 1 else "one seed"
    if len(found.budget.rates) > 1:
        base = next(other.rate for other in found.rows if other.label == BASE)
        said += f"; at {row.rate:g} x your learning rate, DDP at {base:g} x"
    return said + ")"


def _sureness(found: RaceResult, first: Finish, rival: Finish | None) -> str:
    """Say how certain the result is, against DDP and against the next row."""
    ddp = next(row for row in found.rows if row.label == BASE)
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
            tied = as_soon(rival, first) or rival is found.rows[0]
            close = "as fast but less simple" if tied else "whose range overlaps with that"
        assert rival.seconds is not None
        said += f"; next is {rival.label}, {duration(rival.seconds)}, {close}"
    return f"{said}; {trained}" + (f", {_seeds(first)}" if first.label in found.raced else "")


def _last_rate(rates: Sequence[float], best: float) -> str:
    """Note when DDP's best rate is the first or last one tried: with a rate beyond it, the result may differ."""
    if len(rates) == 1 or min(rates) < best < max(rates):
        return ""
    last, further = ("lowest", "lower") if best == min(rates) else ("highest", "higher")
    return f"; DDP learns fastest at {best:g} x your learning rate, the {last} tried: race again from a {further} one"


def _seeds(row: Finish) -> str:
    return f"{row.seeds} seeds" if row.seeds > 1 else "one seed"


def _span(row: Finish) -> str:
    low, high = ("never" if end is None else duration(end) for end in (row.least_seconds, row.most_seconds))
    return low if low == high else f"{low} to {high}"


def line_to_write(rows: Sequence[Row], label: str) -> str:
    """Return the line for the user's script, for the row with this label."""
    row = next(row for row in rows if row.label == label)
    if not row.is_thinwire:
        kept = f"keep DDP, or take the same average without a wrapper: {attach_line('ssgd', {})}"
        return kept if row.kind == BASE and not row.options else f"take {label}"
    return attach_line(row.kind, row.options)


def curves(found: RaceResult) -> dict[str, list[Point]]:
    """Return the losses over seconds on the link, for seed 0."""
    made = {}
    for row in found.rows:
        if (path := found.curves.get(row.label)) is not None and path.steps and row.step_seconds is not None:
            held_out = path.steps[0] == 0  # before the first step no training loss is known
            start = row.start_seconds or 0.0
            made[row.label] = [
                Point(step, start * (step > 0) + step * row.step_seconds, loss, loss if held_out else None)
                for step, loss in zip(path.steps, path.losses)
            ]
    return made


def race_data(found: RaceResult) -> dict[str, Any]:
    """Return the file's content: the result, and what report (``bench``, ``curves``) and plan (``rows``) read of it."""
    asked, measured = found.asked, found.measured
    spec = BenchSpec(model=asked.model, rows=asked.rows, workers=asked.workers, rounds=measured.turns,
                     ranks_per_node=asked.ranks_per_node, link=asked.link, link_bits=asked.link_bits)  # fmt: skip
    bench = summarise(spec, measured.record, emulated=measured.emulated, note=measured.note)
    about = {"elements": bench.parameters, "workers": asked.workers}
    worth = []
    broken = {row.label for row in found.rows if row.note.startswith("failed")}
    for row in asked.rows:
        factor = None if row.label in broken else found.raced.get(row.label)
        if factor is not None and (said := spoken_for(row)) is not None:
            worth.append(said | about | {"factors": factor.factors})
    first = winner(found.rows).label
    return {
        "race": {
            "model": asked.model,
            "winner": first,
            "sentences": sentences(found),
            "next": line_to_write(asked.rows, first),
            "target": found.target,
            "ddp_steps": found.ddp_steps,
            "budget": asdict(found.budget),
            "rows": [asdict(row) for row in found.rows],
        },
        "bench": asdict(bench),
        "curves": {label: [asdict(point) for point in points] for label, points in curves(found).items()},
        "rows": worth,
    }
