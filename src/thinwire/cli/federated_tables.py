"""The tables of ``thinwire federated``: a line for each round, a line for each schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from thinwire.cli.console import plain_table

if TYPE_CHECKING:
    from rich.table import Table

    from thinwire.federated import History, Prediction, RoundRecord

_MOST_ROWS = 40
_CONSTANT = ("lr_decay", 1.0)
"""A rate that stays."""


def in_force(algorithm: Any) -> str:
    """The algorithm and its options, those that are off left out."""
    from thinwire.federated.aggregator import facts

    inner = getattr(algorithm, "inner", algorithm)
    found = facts(inner)
    said = f"{found.pop('algorithm')} with {_words(found)}"
    if inner is not algorithm:
        said += f"; changes compressed by {algorithm.method.name} with {_words(algorithm.method.options())}"
    return said


def _words(options: Mapping[str, Any]) -> str:
    on = {key: value for key, value in options.items() if value not in (None, False, 0) and (key, value) != _CONSTANT}
    return ", ".join(f"{key}={value}" for key, value in on.items())


def outcome(history: History) -> str:
    """What a run has come to: the numbers of its last round."""
    last = history.rounds[-1]
    numbers = {"loss of the clients" if name == "loss" else name: value for name, value in last.metrics.items()}
    words = ", ".join(f"{name} {value:.4g}" for name, value in {**numbers, **last.evaluation}.items())
    return f"after {len(history.rounds)} rounds: {words}"


def rounds_table(history: History) -> Table:
    """What each round did; of a long run the evaluated rounds, and if these are many, one in N of them."""
    about, rows = history.about, history.rounds
    shown = list(rows)
    if len(shown) > _MOST_ROWS:
        shown = [row for row in rows if row.evaluation or row is rows[-1]]
        shown = shown[:: -(-len(shown) // _MOST_ROWS)]
        if rows[-1] not in shown:
            shown.append(rows[-1])
    numbers = sorted({name for row in rows for name in row.evaluation})
    traced = any(row.client_seconds is not None for row in rows)
    devices = "1 device" if about["devices"] == 1 else f"{about['devices']} devices"
    name = f"{about['inner']['algorithm']}, compressed" if "inner" in about else about["algorithm"]
    title = f"{name}: {about['clients_per_round']} of {about['clients']} clients a round, {devices}"
    failing = any(row.failed for row in rows)
    columns = ["round", "schedule", "loss", *numbers, "seconds", "busy", "MB up"]
    columns += (["clients' clock"] if traced else []) + (["failed"] if failing else [])
    table = plain_table(title, columns, ("schedule",))
    for row in shown:
        cells = [str(row.round), row.schedule, _number(row.metrics.get("loss"))]
        cells += [_number(row.evaluation.get(name)) for name in numbers]
        cells += [f"{row.seconds:.3f}", busy_share(row), f"{row.bytes_up / 1e6:.3f}"]
        cells += [f"{row.client_seconds or 0:.1f} s"] if traced else []
        table.add_row(*cells, *([str(len(row.failed) or "")] if failing else []))
    return table


def busy_share(row: RoundRecord) -> str:
    """Mean share of the round in which a device had work."""
    if not row.busy_seconds or not row.device_seconds:
        return "-"
    return f"{sum(row.busy_seconds) / (len(row.busy_seconds) * row.device_seconds):.0%}"


def traffic(history: History) -> str:
    """What the devices sent in the last round, and what its clients would have."""
    row = history.rounds[-1]
    return (
        f"the devices sent {row.bytes_up / 1e6:.3g} MB in the last round; its clients, each on its own, would have "
        f"sent {row.client_bytes / 1e6:.3g} MB"
    )


def failures(history: History, most: int = 5) -> list[str]:
    """Sentences about clients that failed, the first few."""
    found = [
        f"round {row.round}, client {client}: {why}" for row in history.rounds for client, why in row.failed.items()
    ]
    more = [f"... and {len(found) - most} more"] if len(found) > most else []
    return found[:most] + more


def schedules_table(found: Sequence[Prediction], title: str) -> Table:
    """The schedules side by side."""
    table = plain_table(title, ("schedule", "seconds a round", "to the bound", "devices busy"))
    for one in found:
        mean = sum(one.round_seconds) / len(one.round_seconds)
        table.add_row(one.schedule, f"{mean:.3g}", f"{one.ratio:.2f}", f"{one.busy_share:.0%}")
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
