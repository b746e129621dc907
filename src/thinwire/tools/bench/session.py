"""The parent's side of a run: start the ranks with a given launcher, follow their progress, read the record."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from thinwire.core.events import LastWords, python
from thinwire.tools.bench.record import RunRecord
from thinwire.tools.bench.spec import BenchSpec

Progress = Callable[[dict[str, Any]], None]
REFUSED = "refused"  # key of an event: why a rank cannot build the model


class BenchError(RuntimeError):
    """The ranks ended without a record."""


class Launched(Protocol):
    """How a launch ended."""

    @property
    def exit_code(self) -> int:
        """0 if every rank succeeded; 124 if time ran out."""

    @property
    def emulated(self) -> bool:
        """Whether the links were emulated."""

    @property
    def note(self) -> str:
        """How it ran, in one sentence."""


class Launch(Protocol):
    """Runs a command once per worker, with torchrun's environment variables set."""

    def __call__(self, command: list[str], *, on_line: Callable[[int, str], None], timeout_seconds: float) -> Launched:
        """Run it to its end."""


def run_session(
    spec: BenchSpec, launch: Launch, on_progress: Progress = lambda event: None
) -> tuple[RunRecord, Launched]:
    """Run a spec on fresh ranks.

    Raises:
        BenchError: the model cannot be built, or with the last output of the ranks.
    """
    refused: list[str] = []

    def follow(rank: int, event: dict[str, Any]) -> None:
        if REFUSED in event:
            refused.append(event[REFUSED])
        else:
            on_progress(event)

    words = LastWords(follow)
    with tempfile.TemporaryDirectory(prefix="thinwire-bench-") as folder:
        out = Path(folder) / "record.json"
        command = python("-m", "thinwire.tools.bench.worker", "--spec", spec.to_json(), "--out", str(out))
        launched = launch(command, on_line=words, timeout_seconds=spec.timeout_seconds)
        if launched.exit_code == 0 and out.exists():
            return RunRecord.read(out), launched
    if launched.exit_code == 124:
        raise BenchError(
            f"the run took longer than {spec.timeout_seconds:g} s and was stopped; use fewer --steps or raise --timeout"
        )
    if refused:
        raise BenchError(refused[0])
    raise BenchError(words.after(f"the ranks ended with exit code {launched.exit_code}"))
