"""``thinwire demo``: what a thin wire costs, and what one line gives back, on this machine in four minutes."""

from __future__ import annotations

import json as json_module
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.cli.console import plain_table, watched_load

if TYPE_CHECKING:
    from rich.table import Table

    from thinwire.bench.demo import DemoResult

LINK = "200mbit"


def demo(
    quick: Annotated[
        bool, typer.Option("--quick", help="2 workers, no link, a smaller model: under a minute.")
    ] = False,
    steps: Annotated[int, typer.Option(help="Steps of DDP and of exact thinwire.")] = 25,
    out: Annotated[Path, typer.Option(help="Where demo.png and demo.json go.")] = Path("thinwire-out"),
    json: Annotated[bool, typer.Option("--json", help="The result as JSON on stdout.")] = False,
) -> None:
    """Train a character GPT over an emulated 200 Mb/s link: DDP, exact thinwire, thinwire with Power-SGD."""
    from rich.console import Console

    from thinwire import lab
    from thinwire.bench.demo import advice, demo_spec, judge_demo
    from thinwire.bench.plots import plot_curves
    from thinwire.bench.table import seconds
    from thinwire.cli.ranks import run_ranks

    console = Console(stderr=json)
    spec = demo_spec(quick=quick, link=LINK, link_bits=lab.parse_rate(LINK), steps=steps)
    cluster = lab.Cluster.parse(spec.workers, 1, None if quick else LINK, None)
    link = "no limit (--quick)" if quick else LINK
    console.print(
        f"character GPT, {spec.workers} workers on this machine, link {link}; DDP, then exact, then Power-SGD"
    )
    with watched_load(spec.workers) as load:
        record, launched = run_ranks(spec, cluster, total_steps=5 + steps * (4 if quick else 5))
    emulated = launched.emulated and not quick
    result = judge_demo(spec, record, emulated=emulated, note=launched.note)
    out.mkdir(parents=True, exist_ok=True)
    (out / "demo.json").write_text(json_module.dumps(load.with_load(asdict(result)), indent=2))
    picture: str | None = str(out / "demo.png")
    try:
        plot_curves(record.rows, out / "demo.png", f"{result.bench.describe}, {spec.workers} workers, link {link}")
    except ValueError as error:
        picture = None
        console.print(f"no picture: {error}")
    if json:
        typer.echo(json_module.dumps(load.with_load(asdict(result)), indent=2))
    console.print(demo_table(result))
    console.print(
        f"compute alone {seconds(result.bench.compute_seconds)} a step; floor of an exact method at {LINK}: "
        f"{seconds(result.bench.floor_seconds)}"
    )
    if not emulated:
        console.print(
            f"predicted: a step at {LINK}, computed, not measured: max(compute, forward + bytes / rate), a floor. "
            + ("--quick runs without a link." if quick else launched.note)
        )
    console.print(f"written: {out / 'demo.json'}" + (f", {picture}" if picture else ""))
    console.print("\n" + advice(result), highlight=False, markup=False, soft_wrap=True)
    if any(row.error for row in result.rows):
        raise typer.Exit(1)


def demo_table(result: DemoResult) -> Table:
    """The demonstration's table."""
    from rich.text import Text

    from thinwire.bench.table import megabytes, seconds

    predicted = any(row.predicted_seconds is not None for row in result.rows)
    columns = ["method", "step", "MB/step", "steps", f"loss at {result.equal_steps} steps"]
    columns += [f"loss at {result.equal_seconds:.0f} s"] + (["predicted"] if predicted else [])
    table = plain_table(f"{result.bench.describe}; {result.bench.parameters / 1e6:.1f} M parameters", columns)
    for row in result.rows:
        if row.error:
            table.add_row(row.label, Text(f"failed: {row.error}"))
            continue
        losses = [f"{x:.3f}" if x is not None else "-" for x in (row.loss_at_equal_steps, row.loss_at_equal_seconds)]
        cells = [row.label, seconds(row.step_seconds), megabytes(row.bytes_per_step), str(row.steps), *losses]
        table.add_row(*cells, *([seconds(row.predicted_seconds)] if predicted else []))
    return table
