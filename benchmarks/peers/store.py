"""The results file: read, written whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results" / "peers.json"


def read() -> dict[str, Any]:
    """What was measured so far."""
    if RESULTS.exists():
        found: dict[str, Any] = json.loads(RESULTS.read_text())
        return found
    return {"machine": {}, "settings": {}, "versions": {}, "tried": {}, "runs": []}


def write(results: dict[str, Any]) -> None:
    """Replace the file."""
    partial = RESULTS.with_suffix(".partial")
    partial.write_text(json.dumps(results, indent=1) + "\n")
    partial.replace(RESULTS)
