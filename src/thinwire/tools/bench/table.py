"""The table of a comparison."""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from thinwire.tools.bench.summary import BenchResult, RowSummary


def seconds(value: float | None) -> str:
    """Format seconds for people."""
    if value is None:
        return "-"
    if abs(value) >= 0.9995:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if abs(value) < 0.01 else f"{value * 1e3:.0f} ms"


def megabytes(value: float | None) -> str:
    """Format bytes in MB."""
    if value is None:
        return "-"
    return f"{value / 1e6:.2f}" if value < 10e6 else f"{value / 1e6:.1f}"


class WholeTable(Table):
    """A table that becomes a list, a line for each value, on a screen that is too narrow for its columns."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table, or the list."""
        columns = [[_plain(console, cell) for cell in (column.header, *column.cells)] for column in self.columns]
        needed = 0
        for column, texts in zip(self.columns, columns):
            most = 24 if column.justify == "right" else 12  # more is a sentence or a name, which may be folded
            widest = max(cell_len(line) for text in texts for line in text.split("\n"))
            needed += min(most, widest) + 1 + self.padding[1]
        if needed <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        heads, *rows = zip(*columns)
        yield Text(f"{self.title}\n")
        for row in rows:
            yield Text(row[0], style="bold")
            for head, text in zip(heads[1:], row[1:]):
                if text.strip():
                    yield Text(f"  {head}: {text}".replace("\n", " "))


def _plain(console: Console, cell: RenderableType) -> str:
    return console.render_str(cell).plain if isinstance(cell, str) else str(cell)


def bench_table(result: BenchResult) -> RenderableType:
    """Return the table and the lines below it."""
    table = WholeTable(title=_title(result), title_justify="left")
    table.add_column("method")
    predicted = any(row.predicted_seconds is not None for row in result.rows)
    for name in ("step", "spread", "exposed", "MB/step", "loss", "x", *(["predicted"] if predicted else [])):
        table.add_column(name, justify="right")
    for row in result.rows:
        last = "-" if row.predicted_seconds is None else seconds(row.predicted_seconds)
        table.add_row(*_cells(row), *([last] if predicted else []))
    return Group(table, *(Text(line) for line in _notes(result)))


def _title(result: BenchResult) -> str:
    link = result.link or "no limit"
    if result.link and not result.emulated:
        link += " (NOT emulated)"
    return f"{result.describe}; {result.parameters / 1e6:.1f} M parameters; {result.workers} workers; link {link}"


def _cells(row: RowSummary) -> list[str | Text]:
    if row.error:
        return [row.label, Text(f"failed: {row.error}", style="red")]
    loss = "-" if row.loss is None else f"{row.loss:.3f}"
    speedup = "-" if row.speedup is None else f"{row.speedup:.2f}"
    source = {"interface": "", "stats": " (l)", "formula": " (f)"}.get(row.bytes_source, "")
    return [
        row.label,
        seconds(row.step_seconds),
        seconds(row.spread_seconds),
        seconds(row.exposed_seconds),
        megabytes(row.bytes_per_step) + (source if row.bytes_per_step is not None else ""),
        loss,
        speedup,
    ]


def _notes(result: BenchResult) -> list[str]:
    steps = {row.loss_steps for row in result.rows if row.loss is not None}
    notes = [
        f"compute alone {seconds(result.compute_seconds)}, its forward {seconds(result.forward_seconds)}; "
        f"floor of an exact method that ends with backward: {seconds(result.floor_seconds)}"
        " = max(compute, forward + ring bytes / rate)",
        "step: median over steps of the slowest rank; spread: interquartile; exposed: step - compute alone",
    ]
    if any(row.speedup is not None for row in result.rows):
        notes.append("x: times faster than ddp, by steps; a lossy step is worth less than an exact one")
    if steps:
        notes.append(f"loss: training loss after {min(steps)} steps, same weights and data at the start")
    sources = {row.bytes_source for row in result.rows if row.bytes_per_step is not None}
    meaning = {
        "interface": "MB/step: what a node's interface sent, headers included",
        "stats": "(l): thinwire's own ledger, per rank",
        "formula": "(f): ring formula, per rank, not measured",
    }
    notes += [text for source, text in meaning.items() if source in sources]
    for row in result.rows:
        if row.variants:
            notes.append("tried: " + ", ".join(f"{name} {seconds(s)}" for name, s in row.variants.items()))
        if row.label.startswith("auto") and row.why:
            notes.append(f"{row.label}: {row.why[0].removeprefix('auto: ')}")
    if result.link and not result.emulated:
        notes.append(f"the link was not emulated: {result.note}")
    return notes
