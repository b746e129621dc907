"""``thinwire race``: which method is first at DDP's loss, for a model and a link."""

from __future__ import annotations

import functools
import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.tools.cli.console import (
    Congestion,
    Delay,
    Device,
    Jitter,
    Json,
    Link,
    Loss,
    Model,
    RanksPerNode,
    RunFailed,
    Workers,
    check_folder,
    moving,
    plain_table,
    progress,
    slow_wire,
    slowest_link,
    watched_load,
    write_drawing,
)

if TYPE_CHECKING:
    from rich.table import Table

    from thinwire.tools.bench.race import RaceResult


def race(
    model: Model,
    link: Link = "unlimited",
    workers: Workers = 2,
    ranks_per_node: RanksPerNode = 1,
    delay: Delay = "0",
    jitter: Jitter = "0",
    loss: Loss = "0",
    congestion: Congestion = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Methods that race against ddp: powersgd:rank=4,local:sync_every=8 ... By default six methods; where "
            "the network takes most of the time, also local steps with longer periods."
        ),
    ] = None,
    minutes: Annotated[
        float, typer.Option(help="Minutes that the race may take: they decide the length of its runs.")
    ] = 10.0,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Steps of a run, such as 2000, however long that takes; by default what fits into --minutes."
        ),
    ] = None,
    schedule: Annotated[
        str, typer.Option(help="Learning rate over a run: cosine (a rise, then down to a tenth) or constant.")
    ] = "cosine",
    seeds: Annotated[
        int | None,
        typer.Option(help="Number of seeds on which methods are compared; by default 3 or 1, as many as fit."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for race.json and race.png.")] = Path("thinwire-out"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget earlier results: measure and train again.")] = False,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Race methods to DDP's loss on your model and link: who is first, what it costs in steps, how sure that is."""
    import tempfile

    from rich.console import Console

    from thinwire.core.checks import check_choice
    from thinwire.tools import lab
    from thinwire.tools.bench.device import check_device
    from thinwire.tools.bench.models.registry import check_model
    from thinwire.tools.bench.race import (
        DEFAULT_METHODS,
        LONGER_PERIODS,
        RaceSpec,
        RunContext,
        run_race,
    )
    from thinwire.tools.bench.race_answer import curves, race_data
    from thinwire.tools.bench.rows import parse_rows
    from thinwire.tools.bench.summary import loss_picture

    cluster = lab.Cluster.parse(workers, ranks_per_node, link, delay, jitter, loss, congestion)
    bits, wire = slowest_link(cluster), slow_wire(cluster)
    check_device(device)
    check_model(model)
    check_choice("--schedule", schedule, ("cosine", "constant"))
    rows = parse_rows(DEFAULT_METHODS if methods is None else methods)
    longer = LONGER_PERIODS if methods is None else ()
    asked = RaceSpec(model, rows, workers, ranks_per_node, wire, bits, minutes, seeds, device,
                     longer, steps, schedule == "cosine")  # fmt: skip
    check_folder(out)
    if wire and lab.available() == "loopback":
        raise RunFailed(
            "links cannot be emulated here, so nothing can race on one; see thinwire doctor, or thinwire plan"
        )
    console = Console(stderr=json)

    def tell(text: str, steps: int) -> None:
        if steps:
            bar(completed=0, total=steps, description="starting ranks")
        console.print(f"... {text}" if steps else text, style="dim", markup=False, highlight=False)

    apart = lab.Cluster.parse(workers, ranks_per_node, None, None)
    with watched_load(workers) as load, progress("") as bar, tempfile.TemporaryDirectory() as nowhere:
        on_link, beside = functools.partial(lab.run, cluster), functools.partial(lab.run, apart)
        found = run_race(asked, RunContext(on_link, beside, tell, moving(bar), Path(nowhere) if fresh else None))
    data = load.with_load(race_data(found))
    (out / "race.json").write_text(json_module.dumps(data, indent=2) + "\n", encoding="utf-8")
    written = [out / "race.json"]
    if not found.needed:
        picture = loss_picture(curves(found), _title(found), found.target, log=True)
        written += write_drawing(picture, out / "race.png", console)
    if json:
        typer.echo(json_module.dumps(data, indent=2))
    console.print(race_table(found))
    for line in basis(found):
        console.print(line, style="dim", markup=False, highlight=False)
    next_line = f"next: {data['race']['next']}"
    for line in (*data["race"]["sentences"], next_line, f"written: {', '.join(map(str, written))}"):
        console.print(line, markup=False, highlight=False)


def _title(found: RaceResult) -> str:
    asked, record = found.asked, found.measured.record
    link = f"link {asked.link}" if asked.link else "link without a limit"
    return f"{record.describe}; {record.parameters / 1e6:.3g} M parameters, {asked.workers} workers, {link}"


def basis(found: RaceResult) -> list[str]:
    said = [f"{row.label}: {row.note}" for row in found.rows if row.note]
    said.append("step: on the link, the mean of whole periods; x compute: over a step without any exchange")
    if not found.needed:
        said.append(
            "steps: to the loss, relative to DDP, and from least to most over seeds; x DDP: times faster to it than DDP"
        )
    if found.finals:
        share = "half the data" if found.asked.workers == 2 else f"1/{found.asked.workers} of the data"
        said.append(f"loss: held out, at the end; way: from one worker alone, 0, to DDP, 1; its steps see {share}")
    if found.known and not found.trained:
        said.append(f"all {found.known} runs were known from an earlier race, and none was trained again")
    elif found.known:
        said.append(f"{found.known} of {found.known + found.trained} runs were known from an earlier race")
    if since := found.measured.known_since:
        said.append(f"seconds per step: as measured here on {since}; --fresh measures and trains again")
    return said


def race_table(found: RaceResult) -> Table:
    from thinwire.core.words import run_seconds, seconds
    from thinwire.tools.bench.race_answer import steps_range, winner

    tuned = found.budget.search
    whole = ["loss", "way"] if found.finals else []
    columns = ["method", "step", "x compute", *whole, "steps", "range", *["rate"] * tuned, "to loss", "x DDP"]
    to = "step times only" if found.needed else f"to a loss of {found.target:.3f}"
    table = plain_table(f"{_title(found)}\n{to}", columns[:3] if found.needed else columns)
    first = None if found.needed else winner(found.rows)
    options = {row.label: row.options for row in found.asked.rows}
    for row in found.rows:
        raced, there = row.label in found.raced, row.seconds is not None
        name = " ".join([row.label.partition(" ")[0], *map(str, options[row.label].values())])
        cells = [name, "" if row.step_seconds is None else seconds(row.step_seconds)]
        cells.append("" if row.over_compute is None else f"{row.over_compute:.2f}")
        if whole:
            way, ended = found.way(row.label), found.finals.get(row.label)
            cells += ["" if ended is None else f"{ended.final:.3f}", "" if way is None else f"{way:.2f}"]
        cells += ["" if row.steps is None else f"{row.steps:.2f}" if raced else "1", steps_range(row) if raced else ""]
        cells += [f"{row.rate:.3g}" if there else ""] if tuned else []
        cells += ["" if row.seconds is None else run_seconds(row.seconds)]
        cells += ["" if row.sooner is None else f"{row.sooner:.2f}"]
        table.add_row(*cells[: len(table.columns)], style="bold" if row is first else None)
    return table
