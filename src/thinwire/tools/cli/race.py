"""``thinwire race``: which method is first at DDP's loss, for a model and a link."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.tools.cli.console import Output, RunFailed, moving, plain_table, progress, watched_load
from thinwire.tools.cli.options import MODEL, DeviceOption, JsonOption, LabOptions
from thinwire.tools.cli.verb import argument, option

if TYPE_CHECKING:
    from rich.table import Table

    from thinwire.tools.bench.race import RaceResult


class RaceVerb(LabOptions, DeviceOption, JsonOption):
    """Race methods to DDP's loss on your model and link: who is first, what it costs in steps, how sure that is.

    Example: thinwire race mymodule:build --link 100mbit --workers 4
    """

    model: str = argument(..., MODEL)
    methods: str | None = option(
        None,
        "Methods that race against ddp: alone,local,acp:rank=32 ... By default eight; where the network takes most of "
        "the time, also local steps with longer periods.",
    )
    minutes: float = option(10.0, "Minutes that the race may take: they decide the length of its runs.")
    steps: int | None = option(
        None, "Steps of a run, such as 2000, however long that takes; by default what fits into --minutes."
    )
    schedule: str = option(
        "cosine",
        "Learning rate over a run: cosine (a rise, then down to a tenth) or constant.",
        choices=("cosine", "constant"),
    )
    seeds: int | None = option(
        None, "Number of seeds on which methods are compared; by default 3 or 1, as many as fit."
    )
    speeds: str | None = option(None, "Speeds of the workers beside the fastest, which is this machine's: 1,1,0.5,0.5.")
    out: Path = option(Path("thinwire-out"), "Folder for race.json and race.png.", writes="folder")
    fresh: bool = option(False, "Forget earlier results: measure and train again.")

    def run(self, output: Output) -> Any:
        from thinwire.tools import lab
        from thinwire.tools.bench.device import check_device
        from thinwire.tools.bench.models.registry import check_model
        from thinwire.tools.bench.race import (
            DEFAULT_METHODS,
            LONGER_PERIODS,
            OWN_PACE,
            RaceSpec,
            RunContext,
            run_race,
        )
        from thinwire.tools.bench.race_answer import curves, race_data
        from thinwire.tools.bench.rows import parse_rows
        from thinwire.tools.bench.summary import loss_picture
        from thinwire.tools.cli.plan_inputs import read_speeds

        check_device(self.device)
        check_model(self.model)
        speeds = () if self.speeds is None else read_speeds(self.speeds, self.workers, self.ranks_per_node)
        rows = parse_rows(DEFAULT_METHODS if self.methods is None else self.methods)
        rows += OWN_PACE if speeds and self.methods is None else ()
        longer = LONGER_PERIODS if self.methods is None else ()
        more = {**self.wire, "rows": rows, "longer": longer, "schedule": self.schedule == "cosine", "speeds": speeds}
        asked, cluster = RaceSpec(**{**self.part(RaceSpec), **more}), self.cluster
        if asked.link and lab.available() == "loopback":
            raise RunFailed(
                "links cannot be emulated here, so nothing can race on one; see thinwire doctor, or thinwire plan"
            )

        def tell(text: str, steps: int) -> None:
            if steps:
                bar(completed=0, total=steps, description="starting ranks")
            bar.log(f"... {text}" if steps else text)

        apart = lab.Cluster.parse(self.workers, self.ranks_per_node)
        with watched_load(self.workers) as load, progress("") as bar, tempfile.TemporaryDirectory() as nowhere:
            on_link, beside = functools.partial(lab.run, cluster), functools.partial(lab.run, apart)
            folder = Path(nowhere) if self.fresh else None
            found = run_race(asked, RunContext(on_link, beside, tell, moving(bar), folder))
        data = load.with_load(race_data(found))
        picture = None
        if not found.needed:
            picture = loss_picture(curves(found), _title(found), found.target, log=True)
        written = output.keep(self.out, "race", data, picture)
        output.say(race_table(found))
        output.say(*basis(found), style="dim")
        output.say(*data["race"]["sentences"], f"next: {data['race']['next']}")
        output.wrote(*written)
        return data


def _title(found: RaceResult) -> str:
    asked, record = found.asked, found.measured.record
    link = f"link {asked.link}" if asked.link else "link without a limit"
    speeds = f" of speeds {', '.join(f'{speed:g}' for speed in asked.speeds)}" if asked.speeds else ""
    return f"{record.describe}; {record.parameters / 1e6:.3g} M parameters, {asked.workers} workers{speeds}, {link}"


def basis(found: RaceResult) -> list[str]:
    said = [f"{row.label}: {row.note}" for row in found.rows if row.note]
    for row in found.asked.rows:
        if chosen := [f"{key}={value}" for key, value in row.pinned.items() if row.options.get(key) != value]:
            said.append(f"{row.label}: on this link {', '.join(chosen)}")
    said.append("step: on the link, the mean of whole periods; x compute: over a step without any exchange")
    if not found.needed:
        than = "worth: times as soon at it as one worker alone"
        if not any(row.worth for row in found.rows):
            than = "x DDP: times faster to it than DDP"
        said.append(f"steps: to the loss, relative to DDP, and from least to most over seeds; {than}")
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
    from thinwire.core.words import duration, times
    from thinwire.tools.bench.race_answer import steps_range, winner

    tuned = found.budget.search
    whole = ["loss", "way"] if found.finals else []
    spread = ["range"] * (found.budget.seeds > 1)
    held = "worth" if any(row.worth for row in found.rows) else "x DDP"
    columns = ["method", "step", "x compute", *whole, "steps", *spread, *["rate"] * tuned, "to loss", held]
    to = "step times only" if found.needed else f"to a loss of {found.target:.3f}"
    table = plain_table(f"{_title(found)}\n{to}", columns[:3] if found.needed else columns)
    first = None if found.needed else winner(found.rows)
    options = {row.label: row.options for row in found.asked.rows}
    for row in found.rows:
        raced, there = row.label in found.raced, row.seconds is not None
        name = " ".join([row.label.partition(" ")[0], *map(str, options[row.label].values())])
        cells = [name, "" if row.step_seconds is None else duration(row.step_seconds)]
        cells.append("" if row.over_compute is None else f"{row.over_compute:.2f}")
        if whole:
            way, ended = found.way(row.label), found.finals.get(row.label)
            cells += ["" if ended is None else f"{ended.final:.3f}", "" if way is None else f"{way:.2f}"]
        cells += ["" if row.steps is None else f"{row.steps:.2f}" if raced else "1"]
        cells += [steps_range(row) if raced else ""] if spread else []
        cells += [f"{row.rate:.3g}" if there else ""] if tuned else []
        cells += ["" if row.seconds is None else duration(row.seconds)]
        ratio = row.worth if held == "worth" else row.sooner
        cells += ["" if ratio is None else times(ratio)]
        table.add_row(*cells[: len(table.columns)], style="bold" if row is first else None)
    return table
