"""Predictions for the page: a ranking of methods, and a map of winners over bandwidths and workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.tools.report.fields import Data, facts, listed, maybe_number, number, numbers, table, tables, text


@dataclass(frozen=True)
class WinnerCell:
    """The winner at one bandwidth and one number of workers.

    Attributes:
        winner_exact: the best method that does not change the result.
        step_seconds: step time of the winner.
        loss_seconds: the same, times the steps that it needs for one step of exact averaging.
    """

    winner: str
    winner_exact: str
    step_seconds: float
    loss_seconds: float
    dense_seconds: float
    why: str

    @property
    def factor(self) -> float:
        """How many times sooner than dense it reaches a loss."""
        return self.dense_seconds / self.loss_seconds if self.loss_seconds > 0 else 1.0


@dataclass(frozen=True)
class WinnerMap:
    """``cells[i][j]``: the i-th bandwidth with the j-th number of workers; None if nothing was computed."""

    name: str
    facts: str
    bits_per_second: tuple[float, ...]
    workers: tuple[int, ...]
    cells: tuple[tuple[WinnerCell | None, ...], ...]

    @property
    def known(self) -> list[WinnerCell]:
        """All existing cells, row after row."""
        return [cell for row in self.cells for cell in row if cell is not None]


@dataclass(frozen=True)
class RankedMethod:
    """One method's predicted step, and the band in which it should lie.

    ``steps``: how many it needs to a loss for one step of exact averaging; None: unknown.
    """

    label: str
    exact: bool
    step_seconds: float
    low_seconds: float
    high_seconds: float
    exposed_seconds: float
    bytes_sent: float | None
    bound_by: str
    steps: float | None = None


@dataclass(frozen=True)
class MethodRanking:
    """Methods on one model and one network."""

    name: str
    facts: str
    entries: tuple[RankedMethod, ...]
    sentence: str
    left_out: tuple[str, ...] = ()


def read_map(name: str, data: Data) -> WinnerMap:
    """Read what ``thinwire plan --map --json`` wrote."""
    rates, workers = numbers(data, "bits_per_second"), tuple(int(n) for n in numbers(data, "workers"))
    rows = listed(data, "cells")
    if len(rows) != len(rates) or any(not isinstance(row, list) or len(row) != len(workers) for row in rows):
        raise ValueError(f"'cells' must be {len(rates)} rows (bits_per_second) of {len(workers)} cells (workers)")
    upwards = sorted(range(len(rates)), key=rates.__getitem__)
    across = sorted(range(len(workers)), key=workers.__getitem__)
    return WinnerMap(
        name=name,
        facts=facts(data),
        bits_per_second=tuple(rates[i] for i in upwards),
        workers=tuple(workers[j] for j in across),
        cells=tuple(tuple(_cell(rows[i][j]) for j in across) for i in upwards),
    )


def _cell(value: Any) -> WinnerCell | None:
    if value is None:
        return None
    data = table(value, "a cell")
    winner = text(data, "winner")
    if not winner:
        raise ValueError("a cell has no 'winner'")
    return WinnerCell(
        winner,
        text(data, "winner_exact"),
        step := number(data, "step_seconds"),
        step if (loss := maybe_number(data, "loss_seconds")) is None else loss,
        number(data, "dense_seconds"),
        text(data, "why"),
    )


def read_ranking(name: str, data: Data) -> MethodRanking:
    """Read what ``thinwire plan --json`` wrote."""
    entries: Sequence[Data] = tables(data, "entries")
    left_out = tuple(": ".join(map(str, pair)) for pair in data.get("left_out") or () if isinstance(pair, list))
    return MethodRanking(name, facts(data), tuple(_entry(entry) for entry in entries), text(data, "sentence"), left_out)


def _entry(data: Data) -> RankedMethod:
    step = number(data, "step_seconds")
    low, high = maybe_number(data, "low_seconds"), maybe_number(data, "high_seconds")
    return RankedMethod(
        label=text(data, "label"),
        exact=bool(data.get("exact")),
        step_seconds=step,
        low_seconds=step if low is None else low,
        high_seconds=step if high is None else high,
        exposed_seconds=maybe_number(data, "exposed_seconds") or 0.0,
        bytes_sent=maybe_number(data, "bytes_sent"),
        bound_by=text(data, "bound_by"),
        steps=1.0 if data.get("exact") else maybe_number(data, "steps"),
    )
