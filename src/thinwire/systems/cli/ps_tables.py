"""Tables of ``thinwire ps``: the live status of a server, and predictions."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from thinwire.systems.parameter_server.asynchronous import (
    hierarchical_bytes,
    hierarchical_seconds,
    synchronous_step_seconds,
)
from thinwire.tools.cli.console import EVERY_SECONDS, plain_table
from thinwire.tools.lab import parse_delay, parse_rate

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table


def status_table(status: dict[str, Any]) -> Table:
    """Return a table with one line per node, in 80 columns."""
    table = plain_table(_head(status), ("node", "workers", "rounds seen", "behind", "step", "MB up", "MB down"))
    for node in status["nodes"]:
        table.add_row(
            str(node["node"]), str(node["alive"]), str(node["seen"]),
            "idle" if node["behind"] < 0 else str(node["behind"]), f"{node['step_seconds']:.3f} s",
            f"{node['up_bytes'] / 1e6:.1f}", f"{node['down_bytes'] / 1e6:.1f}",
        )  # fmt: skip
    counters = status["counters"]
    words = [f"{name} {counters[name]}" for name in ("joined", "left", "late", "lost") if name in counters]
    for shard in status["shards"]:
        bytes_ = f"{shard['up_bytes'] / 1e6:.1f} MB up, {shard['down_bytes'] / 1e6:.1f} down"
        words.append(f"shard {shard['index']} " + (bytes_ if shard["there"] else "has not connected yet"))
    table.caption = "; ".join(words)
    return table


def _head(status: dict[str, Any]) -> str:
    loss = status["loss"]
    rate = status["gradients"] / max(status["seconds"], 1e-9)
    return (
        f"version {status['version']}, {status['gradients']} gradients, {rate:.1f}/s, staleness "
        f"{status['mean_staleness']:.2f}" + (f", loss {loss:.3f}" if loss is not None else "")
    )


class Screen:
    """The output of a server's run on stderr: a table that follows its status, and lines that stay above it.

    Args:
        table: rich's live display; None if stderr is no terminal: then a status line from time to time.
        console: the console of stderr.
    """

    def __init__(self, table: Live | None, console: Console) -> None:
        self._table, self._console = table, console
        self._told = time.monotonic()

    def status(self, status: dict[str, Any]) -> None:
        """Show the status, unless all nodes have left: the last table with a node in it stays."""
        if self._table is not None:
            if status["nodes"]:
                self._table.update(status_table(status))
        elif time.monotonic() - self._told > EVERY_SECONDS:
            self.say(f"{status['seconds']:.0f} s: {_head(status)}, {len(status['nodes'])} nodes")

    def held_out(self, row: tuple[float, int, float]) -> None:
        """Print a loss on held-out data: seconds, gradients, value."""
        self.say(f"{row[0]:.0f} s: held-out loss {row[2]:.3f} after {row[1]} gradients")

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._told = time.monotonic()
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def live(quiet: bool = False) -> Iterator[Screen]:
    """Open the screen of a server's run."""
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True, quiet=quiet)
    if not console.is_terminal:
        yield Screen(None, console)
        return
    with Live(console=console, refresh_per_second=2, transient=False) as table:
        yield Screen(table, console)


def prediction_table(rows: list[dict[str, Any]]) -> Table:
    """Return a table of what each scheme does per second."""
    columns = ("scheme", "gradients/s", "updates/s", "staleness, max", "MB a gradient")
    table = plain_table("predicted in virtual time, not measured", columns, close=True)
    for row in rows:
        table.add_row(
            row["scheme"], f"{row['gradients_per_second']:.2f}", f"{row['updates_per_second']:.2f}",
            f"{row['mean_staleness']:.2f}, {row['max_staleness']:2d}", f"{row['bytes_per_gradient'] / 1e6:.2f}",
        )  # fmt: skip
    return table


def predict(
    settings: str, nodes: int, workers: int, step: float, spread: float, slow: dict[int, float], millions: float,
    link: str, delay: str, seconds: float, seed: int, shards: int = 0,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return rows for the setting, ASP, synchronous SGD through the server, and a hierarchical all-reduce.

    Raises:
        ValueError: an impossible number or rate.
    """
    from dataclasses import replace

    from thinwire.systems.parameter_server import Link, preset, simulate

    for name, value in (("--step", step), ("--parameters", millions), ("--seconds", seconds)):
        if not value > 0:
            raise ValueError(f"{name} must be above 0, not {value:g}")
    if spread < 0 or nodes < 1 or workers < 1:
        raise ValueError("--spread must not be negative, --nodes and --workers at least 1")
    bits, latency = parse_rate(link), parse_delay(delay)
    payload = int(4e6 * millions)

    def step_seconds(node: int, worker: int, number: int, rng: random.Random) -> float:
        return step * slow.get(node, 1.0) * rng.lognormvariate(0.0, spread)

    rows = []
    for text in dict.fromkeys([settings, "asp", "bsp"]):
        chosen = replace(preset(text), start_nodes=nodes)
        wire = Link(latency, bits)
        trace = simulate(
            chosen, nodes=nodes, workers=workers, seconds=seconds, step_seconds=step_seconds, link=wire,
            server_link=wire, payload_bytes=payload, seed=seed, shards=shards,
        )  # fmt: skip
        ages = trace.staleness()
        batches = trace.gradients * chosen.local_update.steps
        rows.append(
            {
                "scheme": text,
                "gradients_per_second": batches / trace.seconds,
                "updates_per_second": len(trace.updates) / trace.seconds,
                "mean_staleness": sum(age * n for age, n in ages.items()) / max(1, sum(ages.values())),
                "max_staleness": max(ages, default=0),
                "bytes_per_gradient": (trace.bytes_up + trace.bytes_down) / max(1, batches),
            }
        )
    exchange = hierarchical_seconds(payload, nodes, bits, latency)
    period = synchronous_step_seconds(step_seconds, nodes, workers, exchange, seed=seed)
    rows.append(
        {
            "scheme": "hierarchical all-reduce",
            "gradients_per_second": nodes * workers / period,
            "updates_per_second": 1 / period,
            "mean_staleness": 0.0,
            "max_staleness": 0,
            "bytes_per_gradient": hierarchical_bytes(payload, nodes, workers),
        }
    )
    return rows
