"""Results for the page: which kind a file holds, told by its content, and what the page shows of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from thinwire.core.words import duration, rate
from thinwire.tools.report.fields import (
    Data,
    filled,
    listed,
    maybe_number,
    number,
    numbers,
    parsed,
    table,
    tables,
    text,
)
from thinwire.tools.report.log import records
from thinwire.tools.report.runs import RunPicture, grouped, read_journal, read_run, read_step_log
from thinwire.tools.report.traces import StepTrace, read_trace

_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class InputFile:
    name: str
    holds: str
    written: str


@dataclass(frozen=True)
class Inputs:
    """All results of all files, in the order given."""

    sources: tuple[InputFile, ...]
    results: tuple[Result, ...]

    def of(self, kind: type[_Kind]) -> list[_Kind]:
        return [result for result in self.results if isinstance(result, kind)]

    @property
    def maps(self) -> list[WinnerMap]:
        return self.of(WinnerMap)

    @property
    def rankings(self) -> list[MethodRanking]:
        return self.of(MethodRanking)

    @property
    def benches(self) -> list[Bench]:
        return self.of(Bench)

    @property
    def traces(self) -> list[StepTrace]:
        """Timelines, the predicted ones first."""
        return sorted(self.of(StepTrace), key=lambda trace: not trace.predicted)

    @property
    def runs(self) -> list[RunPicture]:
        return self.of(RunPicture)

    def labels(self) -> Iterator[list[str]]:
        """Yield the method labels of each result that names some."""
        for bench in self.benches:
            yield [*(row.label for row in bench.rows), *(curve.label for curve in bench.curves)]
        for ranking in self.rankings:
            yield [entry.label for entry in ranking.entries]
        for group in grouped(self.runs):
            yield list(group.names())
        for found in self.maps:
            yield [label for cell in found.known for label in (cell.winner, cell.winner_exact) if label]


@dataclass(frozen=True)
class BenchRow:
    """One method's figures; ``predicted_seconds`` if the link could not be emulated. Field names are those of bench."""

    label: str
    step_seconds: float | None = None
    spread_seconds: float | None = None
    exposed_seconds: float | None = None
    bytes_per_step: float | None = None
    bytes_source: str = ""
    loss: float | None = None
    speedup: float | None = None
    predicted_seconds: float | None = None
    error: str = ""


@dataclass(frozen=True)
class Curve:
    """Loss of one method during training, held out or not; points without a loss are left out."""

    label: str
    steps: tuple[float, ...]
    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    held_out: bool


@dataclass(frozen=True)
class Bench:
    """A comparison, without the row that exchanges nothing; ``answer``: the sentences of a race."""

    name: str
    describe: str
    workers: int
    link: str
    emulated: bool
    note: str
    parameters: float
    gradient_bytes: float
    compute_seconds: float
    floor_seconds: float
    rows: tuple[BenchRow, ...]
    curves: tuple[Curve, ...] = ()
    answer: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        link = f"link {self.link}" if self.link else "link without a limit"
        if self.link and not self.emulated:
            link = f"link not emulated (figures for {self.link} are computed)"
        size = f"{self.parameters / 1e6:.1f} M parameters, {self.gradient_bytes / 1e6:.1f} MB of gradients"
        return f"{self.describe}; {size}; {self.workers} workers; {link}"


@dataclass(frozen=True)
class WinnerCell:
    """``loss_seconds`` are the winner's step times its steps factor."""

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
        return [cell for row in self.cells for cell in row if cell is not None]


@dataclass(frozen=True)
class RankedMethod:
    """One method's predicted step, the band in which it should lie, and its steps factor, None if unknown."""

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
    name: str
    facts: str
    entries: tuple[RankedMethod, ...]
    sentence: str
    left_out: tuple[str, ...] = ()


Result: TypeAlias = Bench | MethodRanking | WinnerMap | StepTrace | RunPicture


def read_bench(name: str, data: Data) -> Bench:
    predicted: dict[str, float | None] = {}
    inner, answer = data, tuple[str, ...]()
    if "bench" in data:
        inner = table(data["bench"], "'bench'")
    if "race" in data:
        race = table(data["race"], "'race'")
        answer = tuple(text({"sentences": said}, "sentences") for said in listed(race, "sentences"))
    elif "bench" in data:
        predicted = {text(row, "label"): maybe_number(row, "predicted_seconds") for row in tables(data, "rows")}
    curves = table(data.get("curves") or {}, "'curves'")
    return filled(
        Bench,
        inner,
        name=name,
        rows=tuple(
            filled(BenchRow, row, predicted_seconds=predicted.get(text(row, "label")))
            for row in tables(inner, "rows")
            if row.get("label") != "compute"
        ),
        curves=tuple(curve for label in curves if (curve := _curve(label, curves)).steps),
        answer=answer,
    )


def _curve(label: str, curves: Data) -> Curve:
    points = [table(point, "a point of a curve") for point in listed(curves, label)]
    held_out = any(maybe_number(point, "validation") is not None for point in points)
    key = "validation" if held_out else "loss"
    kept = [point for point in points if maybe_number(point, key) is not None]
    steps, seconds, losses = (tuple(number(point, name) for point in kept) for name in ("step", "seconds", key))
    return Curve(label, steps, seconds, losses, held_out)


def read_map(name: str, data: Data) -> WinnerMap:
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
    if not text(data, "winner"):
        raise ValueError("a cell has no 'winner'")
    loss = maybe_number(data, "loss_seconds")
    return filled(WinnerCell, data, loss_seconds=number(data, "step_seconds") if loss is None else loss)


def read_ranking(name: str, data: Data) -> MethodRanking:
    left_out = tuple(": ".join(map(str, pair)) for pair in data.get("left_out") or () if isinstance(pair, list))
    entries = tuple(map(_ranked, tables(data, "entries")))
    return MethodRanking(name, facts(data), entries, text(data, "sentence"), left_out)


def _ranked(data: Data) -> RankedMethod:
    step = number(data, "step_seconds")
    low, high = maybe_number(data, "low_seconds"), maybe_number(data, "high_seconds")
    return filled(
        RankedMethod,
        data,
        low_seconds=step if low is None else low,
        high_seconds=step if high is None else high,
        exposed_seconds=maybe_number(data, "exposed_seconds") or 0.0,
        steps=1.0 if data.get("exact") else maybe_number(data, "steps"),
    )


def facts(data: Data) -> str:
    """Return the short texts and numbers at the top of a file, as its writer wanted them shown."""
    said = []
    for key, value in data.items():
        words = key.replace("_", " ")
        if isinstance(value, str) and value and key != "sentence":
            said.append(f"{words}: {value}")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            if key == "bits_per_second":
                said.append(f"link: {rate(value / 8)}")
            elif key.endswith("_seconds"):
                said.append(f"{words.removesuffix(' seconds')}: {duration(value)}")
            elif key.endswith("_share"):
                said.append(f"{words}: {value:.0%}")
            else:
                said.append(f"{words}: {value:g}")
    return "; ".join(said)


def _is_trace(data: Any) -> bool:
    events = data.get("traceEvents") if isinstance(data, dict) else data
    return isinstance(events, list) and any(isinstance(e, dict) and "ph" in e for e in events)


def _has(*keys: str) -> Callable[[Any], bool]:
    return lambda data: isinstance(data, dict) and all(key in data for key in keys)


def _begins(data: Any, key: str) -> bool:
    return isinstance(data, list) and bool(data) and isinstance(data[0], dict) and key in data[0]


_is_demo = _has("bench", "curves")
_KINDS: Sequence[tuple[str, Callable[[Any], bool], Callable[[str, Any], Result]]] = (
    ("a Chrome trace", _is_trace, read_trace),
    ("a map of winners (thinwire plan --map --json)", _has("cells", "bits_per_second", "workers"), read_map),
    ("a ranking (thinwire plan --json)", _has("entries"), read_ranking),
    ("a run (--json of federated, ps, kfac and split, best.json of supernet)", _has("picture"), read_run),
    ("a race (thinwire race)", _has("race", "bench", "curves"), read_bench),
    ("a demonstration (thinwire demo)", lambda data: _is_demo(data) and "race" not in data, read_bench),
    ("a comparison (thinwire bench --json)", _has("rows", "compute_seconds", "floor_seconds"), read_bench),
    ("a step log (tw.StepLog)", lambda data: _begins(data, "kind"), read_step_log),
    ("a journal (thinwire ps server --journal)", lambda data: _begins(data, "settings"), read_journal),
)


def read_files(paths: Iterable[Path]) -> Inputs:
    """Read and recognise files.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file holds nothing known, or a known kind that is damaged.
    """
    sources: list[InputFile] = []
    results: list[Result] = []
    for path in paths:
        holds = []
        for kind, result in _read(path):
            holds.append(kind)
            results.append(result)
        written = datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y-%m-%d %H:%M")
        sources.append(InputFile(path.name, " and ".join(holds), written))
    return Inputs(tuple(sources), tuple(results))


def _parts(data: Any) -> Iterator[Any]:
    """Yield a file, and the results that ``thinwire plan`` put into it, with their question."""
    yield data
    if isinstance(data, dict):
        asked = data.get("question")
        for key in ("ranking", "map"):
            if isinstance(data.get(key), dict):
                yield {**(asked if isinstance(asked, dict) else {}), **data[key]}


def _content(text: str) -> Any:
    """Parse JSON, or the lines of a log, whose last line may be incomplete."""
    try:
        found = parsed(text)
    except ValueError:
        if not isinstance(parsed(text.partition("\n")[0]), dict):
            raise
        return records(text)
    return [found] if _begins([found], "kind") or _begins([found], "settings") else found


def _read(path: Path) -> list[tuple[str, Result]]:
    try:
        data = _content(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    found = []
    for part in _parts(data):
        for kind, fits, read in _KINDS:
            if fits(part):
                try:
                    found.append((kind, read(path.name, part)))
                except (ValueError, TypeError) as error:
                    raise ValueError(f"{path} looks like {kind} but cannot be read: {error}") from error
    if not found:
        known = "; ".join(kind for kind, _, _ in _KINDS)
        raise ValueError(f"{path} contains nothing that a report can show: {known}")
    return found
