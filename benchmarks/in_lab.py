"""One run of the bench in the lab, for the benchmarks beside this file."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

from thinwire import lab
from thinwire.bench.rows import parse_rows
from thinwire.bench.session import run_session
from thinwire.bench.spec import BenchSpec
from thinwire.bench.summary import BenchResult, summarise


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


def keep(path: Path, fresh: dict[str, Any]) -> list[dict[str, Any]]:
    """Put a network's results into a file, in place of earlier ones of that model, workers and link; returns all."""
    rows = json.loads(path.read_text()) if path.exists() else []
    rows = [row for row in rows if any(row[key] != fresh[key] for key in ("model", "workers", "link"))] + [fresh]
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(rows, indent=2) + "\n")
    return rows
