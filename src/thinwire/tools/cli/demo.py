"""``thinwire demo``: what a thin wire costs, and what one line gives back, on this machine in two minutes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.tools.cli.console import Output, plain_table, run_ranks, watched_load
from thinwire.tools.cli.options import JsonOption
from thinwire.tools.cli.verb import option

if TYPE_CHECKING:
    from rich.table import Table

    from thinwire.tools.bench.demo import DemoResult

LINK, QUICK_LINK = "200mbit", "50mbit"


class DemoVerb(JsonOption):
    """Train a character GPT over an emulated slow link: DDP, then thinwire's "local" until it reaches DDP's loss.

    Example: thinwire demo --quick
    """

    quick: bool = option(False, f"2 workers, {QUICK_LINK}, a smaller model: half a minute.")
    steps: int | None = option(None, "Steps of DDP, whose last loss is the target: 25, or 15 with --quick.", least=1)
    out: Path = option(Path("thinwire-out"), "Folder for demo.png and demo.json.", writes="folder")

    def run(self, output: Output) -> Any:
        from thinwire.core.words import duration
        from thinwire.tools import lab
        from thinwire.tools.bench.demo import conclusion, demo_spec, judge_demo
        from thinwire.tools.bench.summary import loss_picture

        link = QUICK_LINK if self.quick else LINK
        steps = self.steps or (15 if self.quick else 25)
        spec = demo_spec(quick=self.quick, link=link, link_bits=lab.parse_rate(link), steps=steps)
        output.line(
            f"character GPT, {spec.workers} workers on this machine, link {link}; {steps} steps of DDP, then "
            'attach(model, optimizer, "local") until it reaches the same loss'
        )
        with watched_load(spec.workers) as load:
            record, launched = run_ranks(spec, lab.Cluster.parse(spec.workers, 1, link), total_steps=5 + 2 * steps)
        result = judge_demo(spec, record, emulated=launched.emulated, note=launched.note)
        data = load.with_load(result)
        title = f"{result.bench.describe}, {spec.workers} workers, link {link if launched.emulated else 'no limit'}"
        written = output.keep(self.out, "demo", data, loss_picture(result.curves, title, result.target))
        output.say(demo_table(result))
        output.say(
            f"compute alone {duration(result.bench.compute_seconds)} per step; floor of an exact method at {link}: "
            f"{duration(result.bench.floor_seconds)}"
        )
        if not launched.emulated:
            output.say(
                f"the link was not emulated: steps at {link} are computed, max(compute, forward + bytes / rate), a "
                f"floor. {launched.note}"
            )
        output.wrote(*written)
        output.line(*(f"\n{words}" for words in conclusion(result)))
        output.code = int(any(row.error for row in result.rows))
        return data


def demo_table(result: DemoResult) -> Table:
    from rich.text import Text

    from thinwire.core.words import duration, megabytes

    until = "" if result.target is None else f"; until a held-out loss of {result.target:.3f}"
    title = f"{result.bench.describe}; {result.bench.parameters / 1e6:.1f} M parameters{until}"
    table = plain_table(title, ["method", "step", "MB/step", "steps", "seconds"])
    for row in result.rows:
        if row.error:
            table.add_row(row.label, Text(f"failed: {row.error}"))
            continue
        reached = ["never" if x is None else f"{x:.1f}" for x in (row.steps, row.seconds)]
        step = row.step_seconds if row.predicted_seconds is None else row.predicted_seconds
        table.add_row(row.label, duration(step), megabytes(row.bytes_per_step), *reached)
    return table
