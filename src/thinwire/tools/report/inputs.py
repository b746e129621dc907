"""Recognise which kind of result a file holds, from its content."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias

from thinwire.tools.report.fields import parsed
from thinwire.tools.report.journals import read_journal, read_step_log
from thinwire.tools.report.log import records
from thinwire.tools.report.pictures import RunPicture, grouped, read_run
from thinwire.tools.report.predictions import MethodRanking, WinnerMap, read_map, read_ranking
from thinwire.tools.report.results import Bench, read_bench
from thinwire.tools.report.traces import StepTrace, read_trace

Result: TypeAlias = Bench | MethodRanking | WinnerMap | StepTrace | RunPicture


@dataclass(frozen=True)
class InputFile:
    """A file: its name, its kind of content, when it was written."""

    name: str
    holds: str
    written: str


@dataclass(frozen=True)
class Inputs:
    """All results of all files, in the order given."""

    sources: tuple[InputFile, ...]
    results: tuple[Result, ...]

    @property
    def maps(self) -> list[WinnerMap]:
        """Maps of winners."""
        return [result for result in self.results if isinstance(result, WinnerMap)]

    @property
    def rankings(self) -> list[MethodRanking]:
        """Predictions for one cluster."""
        return [result for result in self.results if isinstance(result, MethodRanking)]

    @property
    def benches(self) -> list[Bench]:
        """Measured comparisons."""
        return [result for result in self.results if isinstance(result, Bench)]

    @property
    def traces(self) -> list[StepTrace]:
        """Timelines, the predicted ones first."""
        found = [result for result in self.results if isinstance(result, StepTrace)]
        return sorted(found, key=lambda trace: not trace.predicted)

    @property
    def runs(self) -> list[RunPicture]:
        """Runs that contain their own picture."""
        return [result for result in self.results if isinstance(result, RunPicture)]

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


def _is_trace(data: Any) -> bool:
    events = data.get("traceEvents") if isinstance(data, dict) else data
    return isinstance(events, list) and any(isinstance(e, dict) and "ph" in e for e in events)


def _has(*keys: str) -> Callable[[Any], bool]:
    return lambda data: isinstance(data, dict) and all(key in data for key in keys)


def _begins(data: Any, key: str) -> bool:
    """Return whether these are the lines of a log whose first line has that key."""
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
