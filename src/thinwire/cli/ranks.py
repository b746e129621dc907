"""Ranks for ``bench`` and ``demo``: the lab's cluster as the launcher that bench/ asks for, and a progress bar."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from thinwire.cli.errors import RunFailed

if TYPE_CHECKING:
    from thinwire.bench.record import RunRecord
    from thinwire.bench.session import Launched
    from thinwire.bench.spec import BenchSpec
    from thinwire.lab import Cluster


def slowest_link(cluster: Cluster) -> int | None:
    """Bits per second of the thinnest link; None without a limit."""
    return min((rate for rate in cluster.links if rate), default=None)


def run_ranks(spec: BenchSpec, cluster: Cluster, *, total_steps: int) -> tuple[RunRecord, Launched]:
    """Run a spec in the lab under a progress bar on stderr.

    Raises:
        RunFailed: the ranks failed or time ran out.
    """
    from thinwire import lab
    from thinwire.bench.session import BenchError, run_session

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("starting ranks", total=total_steps)

        def on_progress(event: dict[str, Any]) -> None:
            if "step" in event:
                bar.update(task, advance=1, description=f"{event['row']:<22} loss {event['loss']:.3f}")
            elif "error" in event:
                bar.console.print(f"{event['row']} failed: {event['error']}", style="red", markup=False)
            elif "clock" in event and event.get("of"):
                bar.update(task, total=_total(bar.tasks[0].completed, event))

        try:
            return run_session(spec, functools.partial(lab.run, cluster), on_progress)
        except BenchError as error:
            raise RunFailed(str(error)) from error


def _total(completed: float, event: dict[str, Any]) -> float:
    """Steps in all when a row trains for a time: so far, and what fits into the rest of it."""
    left = max(float(event["of"]) - float(event["clock"]), 0.0)
    return completed + math.ceil(left * int(event["steps"]) / float(event["clock"]))
