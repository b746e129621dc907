"""One line of JSON per training step, and the same figures as TensorBoard scalars: ``stats()`` counters over time.

Each record is one line, written and flushed at once. An existing file is continued, not replaced, so that a restarted
job goes on with its log; a line that was cut off when the job was killed is removed first. No failure of logging (a
full disk, an invalid figure) ends the training: it is reported as one warning in the log ``thinwire``.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

from thinwire.core.checks import check_count, local_path
from thinwire.engine.stats import Stats
from thinwire.tools.report.fields import parsed, table

logger = logging.getLogger("thinwire")
Number = TypeVar("Number", int, float)

COUNTERS = ("rejected_steps", "bytes_sent", "dense_bytes", "exposed_seconds", "deferred_seconds")
"""Counters of :class:`~thinwire.Stats` for which a record holds the increase since the previous record."""


class Counted(Protocol):
    """Something that can be logged: a GradientSync, or the state of ``ddp_hook``."""

    def stats(self) -> Stats:
        """Return the counters since the start."""


class StepLog:
    """Writes one record per call of ``write``, on rank 0 only, or on each rank to its own file.

    Args:
        sync: what ``attach`` returned, or the state of ``ddp_hook``.
        path: a file of JSON lines, which is continued; if its name contains ``{rank}``, that stands for the rank and
            all ranks write. None: no file.
        tensorboard: a folder for TensorBoard, see ``thinwire[tensorboard]``; None: none.
        on_step: called on rank 0 with the step and its figures by name, as TensorBoard gets them: for other trackers.
        every: write only every ``every``-th call; a record covers all steps since the previous one.

    Raises:
        ValueError: nowhere to write to, or a file that cannot be opened.

    Example::

        with tw.StepLog(sync, "steps.jsonl") as log:
            for x, y in batches:
                loss = train_step(x, y)
                log.write(loss=loss.item())
    """

    def __init__(
        self,
        sync: Counted,
        path: str | os.PathLike[str] | None = None,
        *,
        tensorboard: str | os.PathLike[str] | None = None,
        on_step: Callable[[int, dict[str, float]], Any] | None = None,
        every: int = 1,
    ) -> None:
        if path is None and tensorboard is None and on_step is None:
            raise ValueError("a StepLog needs a path, a folder for tensorboard=, or a function for on_step=")
        check_count("every", every)
        self._sync, self._every, self._calls = sync, every, 0
        self._before, self._at = sync.stats(), time.perf_counter()
        rank = self._before.rank
        self._plan: str | None = None
        self._warned = False
        self._file = None
        self._scalars: Any = None
        self._on_step = on_step if rank == 0 else None
        named = None if path is None else local_path(str(path).replace("{rank}", str(rank)))
        if named is not None and (rank == 0 or "{rank}" in str(path)):
            self._file = _continued(named)
        if tensorboard is not None and rank == 0:
            self._scalars = _scalars_in(tensorboard)
        if self._file is not None:
            self._put({"kind": "run", **_run(self._before)})

    def write(self, step: int | None = None, **values: float) -> None:
        """Add a record of what happened since the last one.

        Args:
            step: number of the step; None: the number of synchronised backwards so far, which a checkpoint restores, or
                on a single rank, which has none, the number of calls of ``write``.
            values: further figures by name, such as ``loss``: numbers, or tensors of one element.
        """
        if self._file is None and self._scalars is None and self._on_step is None:
            return
        self._calls += 1
        if self._calls % self._every:
            return
        now, at = self._sync.stats(), time.perf_counter()
        if self._file is not None:
            self._put_plan(now)
        record: dict[str, Any] = {
            "time": time.time(),
            "seconds": at - self._at,
            "steps": now.steps - self._before.steps,
            **{name: getattr(now, name) - getattr(self._before, name) for name in COUNTERS},
        }
        if now.world_size == 1 and now.steps == self._before.steps:  # single rank: no synced steps to count
            record["steps"], record["step"] = self._every, self._calls
        else:
            record["step"] = now.steps
        if step is not None and (number := self._number("step", step, int)) is not None:
            record["step"] = number
        figures = {name: self._number(name, value, float) for name, value in values.items()}
        self._before, self._at = now, at
        if self._file is not None:
            self._put({"kind": "step", **record, "values": figures})
        shown = {f"thinwire/{name}": value for name, value in record.items() if name not in ("step", "time")}
        shown |= {name: value for name, value in figures.items() if value is not None}
        try:
            for name, value in shown.items() if self._scalars is not None else ():
                self._scalars.add_scalar(name, value, record["step"])
            if self._on_step is not None:
                self._on_step(record["step"], shown)
        except Exception as error:  # other packages' writers can raise anything
            self._complain(f"the figures of step {record['step']} could not be passed on: {error}")

    def _put_plan(self, now: Stats) -> None:
        plan = getattr(self._sync, "plan", None)
        mark = plan.hash if plan is not None else repr([bucket.names for bucket in now.buckets])
        if mark != self._plan:
            self._plan = mark
            self._put({"kind": "plan", "step": now.steps, "plan": mark, "buckets": [asdict(b) for b in now.buckets]})

    def _put(self, record: Mapping[str, Any]) -> None:
        assert self._file is not None
        try:
            self._file.write(json.dumps(_plain(record), allow_nan=False) + "\n")
            self._file.flush()
        except (OSError, ValueError) as error:
            self._complain(f"the step log {self._file.name} could not be written: {error}")

    def _number(self, name: str, value: Any, kind: Callable[[Any], Number]) -> Number | None:
        try:
            return kind(value.detach() if hasattr(value, "detach") else value)
        except Exception as error:  # whatever the conversion of the caller's object raises
            self._complain(f"the step log leaves out {name}: {error}")
            return None

    def _complain(self, sentence: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("thinwire: %s", sentence)

    def close(self) -> None:
        """Close the log; idempotent."""
        for open_one in filter(None, (self._file, self._scalars)):
            try:
                open_one.close()
            except Exception as error:  # as in write
                self._complain(f"the step log could not be written to its end: {error}")
        self._file = self._scalars = self._on_step = None

    def __enter__(self) -> StepLog:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def read_log(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the steps of a log, by number.

    If a job was restarted from an earlier checkpoint, some steps appear twice; those of the later run count. Incomplete
    lines are left out.

    Raises:
        OSError: there is no such file.
        ValueError: a record is not as :class:`StepLog` writes it.
    """
    try:
        return steps_of(records(Path(path).read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path} is not a step log: {error}") from error


def records(text: str) -> list[dict[str, Any]]:
    found = []
    for line in text.splitlines():
        try:
            record = parsed(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            found.append(record)
    return found


def steps_of(found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    steps: dict[int, dict[str, Any]] = {}
    for record in found:
        if record.get("kind") == "step" and isinstance(record.get("step"), int):
            logged = table(record.get("values", {}), f"'values' of step {record['step']}")
            values = {k: float(v) if isinstance(v, str) else v for k, v in logged.items()}
            steps[record["step"]] = {**record, "values": values}
    return [steps[number] for number in sorted(steps)]


def _run(stats: Stats) -> dict[str, Any]:
    import torch

    from thinwire import __version__

    return {
        "time": time.time(),
        "step": stats.steps,
        "rank": stats.rank,
        "world_size": stats.world_size,
        "method": stats.method,
        "note": stats.note,
        "host": platform.node(),
        "thinwire": __version__,
        "torch": torch.__version__,
    }


def _continued(path: Path) -> Any:
    """Open the file for writing after its last complete line."""
    try:
        with path.open("ab+") as file:
            size = file.tell()
            start = max(0, size - (1 << 20))
            file.seek(start)
            tail = file.read()
            if tail and not tail.endswith(b"\n"):
                file.truncate(start + tail.rfind(b"\n") + 1)
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"the step log {path} cannot be opened: {error.strerror}") from error


def _plain(value: Any) -> Any:
    """Return data that JSON can hold: a number that is not finite becomes "nan", "inf" or "-inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def _scalars_in(folder: str | os.PathLike[str]) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("writing scalars needs tensorboard: pip install 'thinwire[tensorboard]'") from error
    return SummaryWriter(os.fspath(folder))
