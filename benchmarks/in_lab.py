"""One run in the lab, of the bench or of a script that prints JSON, for the benchmarks beside this file."""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinwire.tools import lab
from thinwire.tools.bench.rows import parse_rows
from thinwire.tools.bench.session import BenchSpec, run_session
from thinwire.tools.bench.summary import BenchResult, summarise


def run(
    model: str,
    methods: str,
    workers: int,
    link: str | None,
    *,
    steps: int,
    rounds: int,
    predict: bool = False,
    warmup: int = 3,
) -> BenchResult:
    """The rows of ``methods`` in turns, one worker a node; ``link`` None: no limit."""
    bits = lab.parse_rate(link) if link else None
    spec = BenchSpec(model, parse_rows(methods), workers, link, bits, steps, rounds, warmup, predict=predict)
    print(f"... {model}: {methods}; {workers} workers, {link or 'no limit'}", file=sys.stderr, flush=True)
    record, launched = run_session(spec, functools.partial(lab.run, lab.Cluster.parse(workers, 1, link, None)))
    return summarise(spec, record, emulated=launched.emulated, note=launched.note)


def told(
    command: Sequence[str],
    workers: int,
    link: str,
    seconds: float,
    *,
    ranks_per_node: int = 1,
    may_end: bool = True,
    **options: Any,
) -> list[tuple[int, float, dict[str, Any]]]:
    """The lines of JSON that a Python script's ranks print: by whom, after how many seconds, and what.

    Args:
        command: the script and its arguments.
        workers, link, ranks_per_node: of the lab.
        seconds: after which the run is ended.
        may_end: False: the script trains without end, and is ended.
        options: as of ``lab.run``.
    """
    lines: list[tuple[int, float, dict[str, Any]]] = []
    began = time.monotonic()

    def on_line(rank: int, line: str) -> None:
        if line.startswith("{"):
            lines.append((rank, time.monotonic() - began, json.loads(line)))
        elif may_end:
            print(f"[{rank}] {line}", file=sys.stderr, flush=True)

    print(f"... {' '.join(command[1:])}; {workers} workers, {link}", file=sys.stderr, flush=True)
    cluster = lab.Cluster.parse(workers, ranks_per_node, link)
    result = lab.run(cluster, [sys.executable, *command], on_line=on_line, timeout_seconds=seconds, **options)
    if may_end and (result.exit_code or not lines):
        sys.exit(f"{command[0]} failed at {link}")
    return lines


def keep(path: Path, fresh: dict[str, Any]) -> list[dict[str, Any]]:
    """Put a network's results into a file, in place of earlier ones of that model, workers and link; returns all."""
    rows = json.loads(path.read_text()) if path.exists() else []
    rows = [row for row in rows if any(row[key] != fresh[key] for key in ("model", "workers", "link"))] + [fresh]
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(rows, indent=2) + "\n")
    return rows
