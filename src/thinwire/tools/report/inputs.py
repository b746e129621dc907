"""Results for the page: which kind a file holds, told by its content, and what the page shows of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from thinwire.core.records import UNREADABLE, made
from thinwire.core.words import duration, rate
from thinwire.predict.choose import Map, Ranking
from thinwire.tools.bench.rows import COMPUTE
from thinwire.tools.bench.session import Point
from thinwire.tools.bench.summary import BenchResult
from thinwire.tools.report.fields import Data, parsed
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
    def traces(self) -> list[StepTrace]:
        """Timelines, the predicted ones first."""
        return sorted(self.of(StepTrace), key=lambda trace: not trace.predicted)

    def labels(self) -> Iterator[list[str]]:
        """Yield the method labels of each result that names some."""
        for bench in self.of(Bench):
            yield [*(row.label for row in bench.found.rows), *bench.curves]
        for plan in self.of(Planned):
            if isinstance(plan.found, Ranking):
                yield [entry.label for entry in plan.found.entries]
        for group in grouped(self.of(RunPicture)):
            yield list(group.names())
        for plan in self.of(Planned):
            if isinstance(plan.found, Map):
                yield [label for row in plan.found.cells for one in row for label in (one.winner, one.winner_exact)]


@dataclass(frozen=True)
class Bench:
    """A comparison, without the row that exchanges nothing; ``answer``: the sentences of a race.

    ``curves``: losses during training, by label; points without a loss are left out.
    """

    name: str
    found: BenchResult
    curves: dict[str, list[Point]]
    answer: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        found = self.found
        link = f"link {found.link}" if found.link else "link without a limit"
        if found.link and not found.emulated:
            link = f"link not emulated (figures for {found.link} are computed)"
        size = f"{found.parameters / 1e6:.1f} M parameters, {found.gradient_bytes / 1e6:.1f} MB of gradients"
        return f"{found.describe}; {size}; {found.workers} workers; {link}"


@dataclass(frozen=True)
class Planned:
    """What ``thinwire plan`` found; ``facts``: the question, and other short texts and numbers of the file."""

    name: str
    facts: str
    found: Map | Ranking


Result: TypeAlias = Bench | Planned | StepTrace | RunPicture


def read_bench(name: str, data: Data) -> Bench:
    found = BenchResult.from_data(data.get("bench", data))
    rows = tuple(row for row in found.rows if row.label != COMPUTE)
    answer, curves = tuple[str, ...](), made(dict[str, list[Point]], data.get("curves", {}))
    if "race" in data:
        answer = made(tuple[str, ...], data["race"]["sentences"])
    elif "bench" in data:
        predicted = {row["label"]: row.get("predicted_seconds") for row in data["rows"]}
        rows = tuple(replace(row, predicted_seconds=predicted.get(row.label)) for row in rows)
    kept = {label: [p for p in points if math.isfinite(p.judged)] for label, points in curves.items()}
    kept = {label: points for label, points in kept.items() if points}
    return Bench(name, replace(found, rows=rows), kept, answer)


def read_map(name: str, data: Data) -> Planned:
    found = Map.from_data(data)
    if [len(row) for row in found.cells] != [len(found.workers)] * len(found.bits_per_second):
        raise ValueError("'cells' must be a row for each of bits_per_second, of a cell for each of workers")
    return Planned(name, facts(data), found)


def read_ranking(name: str, data: Data) -> Planned:
    return Planned(name, facts(data), Ranking.from_data(data))


def facts(data: Data) -> str:
    """Return the short texts and numbers at the top of a file, as its writer wanted them shown."""
    said = []
    for key, value in data.items():
        words = key.replace("_", " ")
        if isinstance(value, str) and value and key not in ("sentence", "best", "best_exact"):
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
                except UNREADABLE as error:
                    raise ValueError(f"{path} looks like {kind} but cannot be read: {error}") from error
    if not found:
        known = "; ".join(kind for kind, _, _ in _KINDS)
        raise ValueError(f"{path} contains nothing that a report can show: {known}")
    return found
