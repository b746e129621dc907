"""The tables of ``thinwire federated``: one line per round, or one line per schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from thinwire.systems.federated.history import TRAINING_LOSS
from thinwire.tools.cli.console import plain_table

if TYPE_CHECKING:
    from rich.table import Table

    from thinwire.systems.federated import History, Prediction, RoundRecord

_MOST_ROWS = 25
_CONSTANT = ("lr_decay", 1.0)
"""A constant learning rate."""


def in_force(algorithm: Any) -> str:
    """Return the algorithm and its options, without those that are off."""
    from thinwire.systems.federated.aggregator import facts_of

    inner = getattr(algorithm, "inner", algorithm)
    found = facts_of(inner)
    said = f"{found.pop('algorithm')} with {_words(found)}"
    if inner is not algorithm:
        said += f"; changes compressed by {algorithm.method.name} with {_words(algorithm.method.options())}"
    return said


def _words(options: Mapping[str, Any]) -> str:
    on = {key: value for key, value in options.items() if value not in (None, False, 0) and (key, value) != _CONSTANT}
    return ", ".join(f"{key}={value}" for key, value in on.items())


def outcome(history: History, chance: Mapping[str, float] | None = None) -> str:
    """Return the result of a run: the numbers of its last round, next to those of guessing."""
    last = history.rounds[-1]
    guessed = {name: f" (chance: {value:.3g})" for name, value in (chance or {}).items()}
    words = [f"{name} {value:.4g}{guessed.get(name, '')}" for name, value in last.numbers.items()]
    return f"after {len(history.rounds)} rounds: {', '.join(words)}"


def rounds_table(history: History, width: int) -> Table:
    """Return a table of rounds, from the untrained model on; in a long run only evaluated rounds, or every N-th."""
    about, rows = history.about, history.rounds
    shown = list(rows)
    if len(shown) > _MOST_ROWS:
        shown = [row for row in rows if row.evaluation or row is rows[-1]]
        shown = shown[:: -(-len(shown) // _MOST_ROWS)]
        if rows[-1] not in shown:
            shown.append(rows[-1])
    numbers = _evaluated(history)
    columns = {"round": [str(row.round + 1) for row in shown]}
    columns |= {name: [_number(row.numbers.get(name)) for row in shown] for name in (TRAINING_LOSS, *numbers)}
    if any(row.failed for row in rows):
        columns["failed"] = [str(len(row.failed) or "") for row in shown]
    if any(row.client_seconds is not None for row in rows):
        columns["clients' s"] = [f"{row.client_seconds or 0:.1f}" for row in shown]
    columns["seconds"] = [f"{row.seconds:.3f}" for row in shown]
    if about["devices"] > 1:
        columns["schedule"] = [" ".join(dict.fromkeys(row.schedule.split())) for row in shown]
        columns["busy"] = [busy_share(row) for row in shown]
    columns["MB up"] = [f"{_sent(row) / 1e6:.3f}" for row in shown]
    if history.start:
        untrained = {"round": "0", **{name: _number(history.start.get(name)) for name in numbers}}
        columns = {name: [untrained.get(name, ""), *cells] for name, cells in columns.items()}
    devices = "1 device" if about["devices"] == 1 else f"{about['devices']} devices"
    name = f"{about['inner']['algorithm']}, compressed" if "inner" in about else about["algorithm"]
    return _fitting(
        f"{name}: {about['clients_per_round']} of {about['clients']} clients a round, {devices}", columns, width
    )


def algorithms_table(runs: Mapping[str, History], title: str, width: int) -> Table:
    """Return a table of the algorithms side by side, with their results."""
    numbers = list(dict.fromkeys(name for history in runs.values() for name in _evaluated(history)))
    last = [history.rounds[-1] for history in runs.values()]
    columns = {"algorithm": list(runs)}
    columns |= {name: [_number(row.numbers.get(name)) for row in last] for name in (*numbers, TRAINING_LOSS)}
    rounds = [history.rounds for history in runs.values()]
    if any(row.client_seconds is not None for rows in rounds for row in rows):
        columns["clients' s"] = [f"{sum(row.client_seconds or 0 for row in rows):.1f}" for rows in rounds]
    columns["seconds"] = [f"{sum(row.seconds for row in rows):.1f}" for rows in rounds]
    columns["MB a client"] = [f"{fmean(row.client_bytes / row.clients for row in rows) / 1e6:.3f}" for rows in rounds]
    return _fitting(title, columns, width)


def _sent(row: RoundRecord) -> int:
    """Return the bytes, including values that were collected one by one."""
    return row.bytes_up + row.control_bytes


def _evaluated(history: History) -> list[str]:
    return sorted({name for row in history.rounds for name in row.evaluation})


def _fitting(title: str, columns: Mapping[str, Sequence[str]], width: int) -> Table:
    """Return a table of the first columns that fit, which says what it leaves out."""
    names = list(columns)
    needed = {name: max(map(len, (name, *cells))) for name, cells in columns.items()}
    while len(names) > 2 and sum(needed[name] + 1 for name in names) + 1 > width:
        names.pop()
    table = plain_table(title, names, ("schedule",), close=sum(needed[name] + 3 for name in names) > width)
    for cells in zip(*(columns[name] for name in names), strict=True):
        table.add_row(*cells)
    if left_out := [name for name in columns if name not in names]:
        table.caption = f"no room here for: {', '.join(left_out)} (--json has all)"
        table.caption_justify = "left"
    return table


def busy_share(row: RoundRecord) -> str:
    """Return the mean fraction of the round in which a device had work."""
    if not row.busy_seconds or not row.device_seconds:
        return "-"
    return f"{sum(row.busy_seconds) / (len(row.busy_seconds) * row.device_seconds):.0%}"


def traffic(history: History) -> str:
    """Return what the devices sent in the last round, and what its clients would have sent."""
    row = history.rounds[-1]
    return (
        f"the devices sent {_sent(row) / 1e6:.3g} MB in the last round; its clients, each on its own, would have "
        f"sent {row.client_bytes / 1e6:.3g} MB"
    )


def failures(history: History, most: int = 5) -> list[str]:
    """Return sentences about the first few clients that failed."""
    found = [
        f"round {row.round + 1}, client {client}: {why}" for row in history.rounds for client, why in row.failed.items()
    ]
    more = [f"... and {len(found) - most} more"] if len(found) > most else []
    return found[:most] + more


def schedules_table(found: Sequence[Prediction], title: str) -> Table:
    """Return a table of the schedules side by side, with each number a mean over the same rounds."""
    table = plain_table(title, ("schedule", "seconds a round", "to the bound", "devices busy"))
    table.caption = "Means. lpt and auto deal out the first 2 rounds as equal does."
    table.caption_justify = "left"
    for one in found:
        table.add_row(one.schedule, f"{one.seconds:.3g}", f"{one.ratio:.2f}", f"{one.busy_share:.0%}")
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
