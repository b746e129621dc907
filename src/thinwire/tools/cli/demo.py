"""``thinwire demo``: what a thin wire costs, and what one line gives back, on this machine in two minutes."""

from __future__ import annotations

import json as json_module
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.tools.cli.console import Json, check_folder, plain_table, run_ranks, watched_load, write_drawing

if TYPE_CHECKING:
    from rich.table import Table

    from thinwire.tools.bench.demo import DemoResult

LINK, QUICK_LINK = "200mbit", "50mbit"


def demo(
    quick: Annotated[
        bool, typer.Option("--quick", help=f"2 workers, {QUICK_LINK}, a smaller model: half a minute.")
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(help="Steps of DDP, whose final loss is then the target of Power-SGD: 25, or 15 with --quick."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for demo.png and demo.json.")] = Path("thinwire-out"),
    json: Json = False,
) -> None:
    """Train a character GPT over an emulated slow link: DDP, then thinwire's Power-SGD until it reaches DDP's loss."""
    from rich.console import Console

    from thinwire.core.words import seconds
    from thinwire.tools import lab
    from thinwire.tools.bench.demo import advice, demo_spec, headline, judge_demo
    from thinwire.tools.bench.summary import loss_picture

    console = Console(stderr=json)
    link = QUICK_LINK if quick else LINK
    steps = (15 if quick else 25) if steps is None else steps
    spec = demo_spec(quick=quick, link=link, link_bits=lab.parse_rate(link), steps=steps)
    cluster = lab.Cluster.parse(spec.workers, 1, link, None)
    check_folder(out)
    console.print(
        f"character GPT, {spec.workers} workers on this machine, link {link}; {steps} steps of DDP, then Power-SGD "
        "until it reaches the same loss",
        soft_wrap=True,
    )
    with watched_load(spec.workers) as load:
        record, launched = run_ranks(spec, cluster, total_steps=5 + 2 * steps)
    result = judge_demo(spec, record, emulated=launched.emulated, note=launched.note)
    (out / "demo.json").write_text(json_module.dumps(load.with_load(asdict(result)), indent=2))
    title = f"{result.bench.describe}, {spec.workers} workers, link {link if launched.emulated else 'no limit'}"
    drawn = write_drawing(loss_picture(result.curves, title, result.target), out / "demo.png", console)
    if json:
        typer.echo(json_module.dumps(load.with_load(asdict(result)), indent=2))
    console.print(demo_table(result))
    console.print(
        f"compute alone {seconds(result.bench.compute_seconds)} per step; floor of an exact method at {link}: "
        f"{seconds(result.bench.floor_seconds)}"
    )
    if not launched.emulated:
        console.print(
            f"the link was not emulated: steps at {link} are computed, max(compute, forward + bytes / rate), a floor. "
            + launched.note
        )
    console.print(f"written: {', '.join(map(str, [out / 'demo.json', *drawn]))}", soft_wrap=True)
    for words in (headline(result), advice(result)):
        console.print("\n" + words, highlight=False, markup=False, soft_wrap=True)
    if any(row.error for row in result.rows):
        raise typer.Exit(1)


def demo_table(result: DemoResult) -> Table:
    from rich.text import Text

    from thinwire.core.words import megabytes, seconds

    until = "" if result.target is None else f"; until a held-out loss of {result.target:.3f}"
    title = f"{result.bench.describe}; {result.bench.parameters / 1e6:.1f} M parameters{until}"
    table = plain_table(title, ["method", "step", "MB/step", "steps", "seconds"])
    for row in result.rows:
        if row.error:
            table.add_row(row.label, Text(f"failed: {row.error}"))
            continue
        reached = ["never" if x is None else f"{x:.1f}" for x in (row.steps, row.seconds)]
        step = row.step_seconds if row.predicted_seconds is None else row.predicted_seconds
        table.add_row(row.label, seconds(step), megabytes(row.bytes_per_step), *reached)
    return table
