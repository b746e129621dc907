"""Ranks of verbs: those started by torchrun and those of the lab, with a progress bar that follows them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from thinwire.core.events import LastWords
from thinwire.tools.cli.console import Bar, progress
from thinwire.tools.cli.errors import RunFailed

if TYPE_CHECKING:
    from thinwire.tools.bench.record import RunRecord
    from thinwire.tools.bench.session import Launched
    from thinwire.tools.bench.spec import BenchSpec
    from thinwire.tools.lab import Cluster, LabResult


def under_torchrun() -> bool:
    """Return whether torchrun, or the lab, has started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def torchrun_group() -> Iterator[tuple[int, int]]:
    """Yield this process's rank and the number of ranks: of torchrun's group, opened and closed here, or (0, 1)."""
    if not under_torchrun():
        yield 0, 1
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def slowest_link(cluster: Cluster) -> int | None:
    """Return the bits per second of the slowest link; None without a limit."""
    return min((rate for rate in cluster.links if rate), default=None)


def run_ranks(spec: BenchSpec, cluster: Cluster, *, total_steps: int) -> tuple[RunRecord, Launched]:
    """Run a spec in the lab under a progress bar on stderr."""
    from thinwire.tools import lab
    from thinwire.tools.bench.session import run_session

    with progress("starting ranks", total_steps) as bar:
        return run_session(spec, functools.partial(lab.run, cluster), moving(bar))


def moving(bar: Bar) -> Callable[[dict[str, Any]], None]:
    """Return a function that updates a bar from events of bench ranks: a step, a failure."""

    def on_progress(event: dict[str, Any]) -> None:
        if "step" in event:
            bar(completed=bar.completed + 1, description=f"{event['row']:<22} loss {event['loss']:.3f}")
        elif "error" in event:
            bar.say(f"{event['row']} failed: {event['error']}", "red")

    return on_progress


def follow(cluster: Cluster, command: list[str], *, timeout_seconds: float) -> LabResult:
    """Run ranks in the lab with a progress bar that their events ``{"done": share, "text": ...}`` update.

    Raises:
        RunFailed: with the last output of the ranks.
    """
    from thinwire.tools import lab

    with progress("starting ranks", 100) as bar:
        words = LastWords(lambda rank, event: bar(completed=round(100 * event["done"]), description=event["text"]))
        launched = lab.run(cluster, command, on_line=words, timeout_seconds=timeout_seconds)
    if launched.exit_code == 124:
        raise RunFailed(f"the ranks took longer than {timeout_seconds:g} s and were stopped")
    if launched.exit_code:
        raise RunFailed(words.after(f"the ranks ended with exit code {launched.exit_code}"))
    return launched
