"""The tables of ``thinwire split``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import stdev
from typing import TYPE_CHECKING

from thinwire.cli.console import plain_table

if TYPE_CHECKING:
    from rich.table import Table

    from thinwire.split.compare import ComparisonRow
    from thinwire.split.estimate import Estimate
    from thinwire.split.tasks import Task


def plan_table(rows: Mapping[str, Estimate], task: Task, link: str, link_down: str | None) -> Table:
    """Return a table with a step of each kind of cut."""
    columns = ("cut", "kB up", "kB down", "messages", "of boundary", "link s", "compute s", "step s")
    table = plain_table(f"{task.describe}; {_link(link, link_down)}", columns, close=True)
    base = rows["boundary"].wire
    for name, row in rows.items():
        table.add_row(
            name,
            _kilo(row.bytes_up),
            _kilo(row.bytes_down),
            str(row.messages),
            f"1/{base / row.wire:.1f}",
            f"{row.link_seconds:.3f}",
            "-" if row.compute_seconds is None else f"{row.compute_seconds:.3f}",
            "-" if row.step_seconds is None else f"{row.step_seconds:.3f}",
        )
    return table


def compare_table(rows: Sequence[ComparisonRow], task: Task, link: str, link_down: str | None, seeds: int) -> Table:
    """Return a table of accuracy, bytes and seconds of each way of training."""
    title = f"{task.describe}; {_link(link, link_down)}; {seeds} seed{'s' * (seeds > 1)}"
    columns = ("training", task.metric, "kB/step", "payload", "socket", "compute s", "step s")
    table = plain_table(title, columns, close=True)
    plain = next((row for row in rows if row.name == "boundary"), None)
    for row in rows:
        score = f"{row.score:.4f}" + (f" ±{stdev(row.scores):.4f}" if len(row.scores) > 1 else "")
        cells = ["-", "-", "-"]
        if row.wire_bytes is not None and row.state_bytes is not None:
            cells[0] = _kilo(row.wire_bytes)
            if plain is not None and plain.wire_bytes and plain.state_bytes:
                cells[1:] = [
                    f"1/{plain.state_bytes / row.state_bytes:.1f}",
                    f"1/{plain.wire_bytes / row.wire_bytes:.1f}",
                ]
        table.add_row(row.name, score, *cells, f"{row.compute_seconds:.3f}", f"{row.step_seconds:.3f}")
    return table


def _link(up: str, down: str | None) -> str:
    return up if down is None else f"{up} up, {down} down"


def _kilo(count: float) -> str:
    return f"{count / 1e3:.2f}" if count < 1e5 else f"{count / 1e3:,.0f}"
