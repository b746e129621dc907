"""Tables of ``thinwire ps``: the live status of a server, and predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from thinwire.cli.console import plain_table

if TYPE_CHECKING:
    from rich.table import Table


def status_table(status: dict[str, Any]) -> Table:
    """One line per node."""
    from rich.table import Table

    loss = status["loss"]
    rate = status["gradients"] / max(status["seconds"], 1e-9)
    title = (
        f"version {status['version']}, {status['gradients']} gradients, {rate:.1f}/s, staleness "
        f"{status['mean_staleness']:.2f} (most {status['max_staleness']})"
    )
    table = Table(title=title + (f", loss {loss:.3f}" if loss is not None else ""))
    for name in ("node", "member", "workers", "IN", "behind", "step", "MB up", "MB down"):
        table.add_column(name, justify="right")
    for node in status["nodes"]:
        table.add_row(
            str(node["node"]), str(node["member"] % 100_000), str(node["alive"]), str(node["seen"]),
            "idle" if node["behind"] < 0 else str(node["behind"]), f"{node['step_seconds']:.3f} s",
            f"{node['up_bytes'] / 1e6:.1f}", f"{node['down_bytes'] / 1e6:.1f}",
        )  # fmt: skip
    counters = status["counters"]
    words = [f"{name} {counters[name]}" for name in ("joined", "left", "late", "lost") if name in counters]
    for shard in status["shards"]:
        bytes_ = f"{shard['up_bytes'] / 1e6:.1f} MB up, {shard['down_bytes'] / 1e6:.1f} down"
        words.append(f"shard {shard['index']} " + (bytes_ if shard["there"] else "is still to come"))
    table.caption = "; ".join(words)
    return table


@contextmanager
def live() -> Iterator[Callable[[dict[str, Any]], None]]:
    """A table on stderr that follows the server's status."""
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), refresh_per_second=2, transient=False) as screen:
        yield lambda status: screen.update(status_table(status))


def prediction_table(rows: list[dict[str, Any]]) -> Table:
    """What each scheme does per second."""
    columns = ("scheme", "gradients/s", "updates/s", "staleness mean", "most", "MB per gradient")
    table = plain_table("predicted in virtual time, not measured", columns)
    for row in rows:
        table.add_row(
            row["scheme"], f"{row['gradients_per_second']:.2f}", f"{row['updates_per_second']:.2f}",
            f"{row['mean_staleness']:.2f}", str(row["max_staleness"]), f"{row['bytes_per_gradient'] / 1e6:.2f}",
        )  # fmt: skip
    return table
