"""The log of a run: one line of JSON per update, enough to repeat every update bit for bit."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.core.checks import local_path
from thinwire.core.durable import write_whole
from thinwire.systems.parameter_server.effects import Apply, Contribution
from thinwire.systems.parameter_server.leader import Aggregator
from thinwire.systems.parameter_server.messages import Row
from thinwire.systems.parameter_server.outer import FlatWeights, Outer
from thinwire.systems.parameter_server.settings import Settings


@dataclass(frozen=True)
class Update:
    """One line: the update that made ``version`` + 1, when (seconds), and its contributions without their tensors."""

    version: int
    at_seconds: float
    parts: tuple[Contribution, ...]

    @classmethod
    def of(cls, effect: Apply, at_seconds: float) -> Update:
        return cls(effect.version, at_seconds, tuple(replace(part, tensor=None) for part in effect.contributions))

    def to_json(self) -> str:
        parts = [
            [p.node, p.member, p.scale, float(len(p.rows)), [[r.base, r.worker, r.step, r.samples] for r in p.rows]]
            for p in self.parts
        ]
        return json.dumps({"version": self.version, "at": self.at_seconds, "parts": parts})

    @classmethod
    def from_json(cls, line: str) -> Update:
        data = json.loads(line)
        parts = tuple(
            Contribution(node, member, tuple(Row(*row) for row in rows), scale)
            for node, member, scale, _, rows in data["parts"]
        )
        return cls(int(data["version"]), float(data["at"]), parts)


@dataclass(frozen=True)
class Journal:
    """A run: its settings, what else is needed to repeat it, and its updates."""

    settings: Settings
    facts: dict[str, Any]
    updates: tuple[Update, ...]

    @classmethod
    def read(cls, path: str | Path) -> Journal:
        """Read a file, but not a last line that a kill has cut. ``ValueError``: it is not a journal."""
        try:
            lines = local_path(path).read_text().splitlines()
            head = json.loads(lines[0])
            settings = Settings.from_json(json.dumps(head["settings"]))
            updates = []
            for place, line in enumerate(lines[1:], 1):
                try:
                    updates.append(Update.from_json(line))
                except json.JSONDecodeError:
                    if place != len(lines) - 1:
                        raise
            return cls(settings, dict(head["facts"]), tuple(updates))
        except (AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a journal of a parameter server ({error})") from error


class JournalWriter:
    """Appends updates to a file, whose updates below ``version`` stay. ``ValueError``: not writable, or no journal."""

    def __init__(self, path: str | Path, settings: Settings, facts: dict[str, Any], version: int = 0) -> None:
        self._path = local_path(path)
        kept: Sequence[Update] = ()
        if version and self._path.exists():
            kept = [update for update in Journal.read(path).updates if update.version < version]
        head = json.dumps({"settings": json.loads(settings.to_json()), "facts": facts})
        try:
            if kept:  # if killed here, the old file or the new one is there, complete
                write_whole(self._path, "".join(f"{line}\n" for line in (head, *(update.to_json() for update in kept))))
            self._file = self._path.open("ab" if kept else "wb", buffering=0)
            self._whole = self._path.stat().st_size if kept else 0
            if not kept:
                self._line(head)
        except OSError as error:
            raise ValueError(f"the journal {path} cannot be written: {error}") from error

    def write(self, update: Update) -> None:
        """Append one update at once. ``OSError``: the file is cut after the last complete one, and closed."""
        try:
            self._line(update.to_json())
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._whole)
            self.close()
            raise OSError(f"the journal {self._path} could not be written ({error})") from error

    def _line(self, text: str) -> None:
        line = f"{text}\n".encode()
        rest = line
        while rest:
            rest = rest[self._file.write(rest) or 0 :]
        self._whole += len(line)

    def close(self) -> None:
        self._file.close()


class LocalWork:
    """What a member hands in where no loop of a user's runs: in a simulation, or when a run is repeated.

    ``inner``: makes the optimizer of local steps, which keeps its state; None: plain SGD.
    """

    def __init__(self, steps: int | None, inner: Outer | None) -> None:
        self._steps, self._inner = steps, inner or (lambda params: torch.optim.SGD(params, lr=0.05))
        self._x: Tensor | None = None

    def submission(self, theta: Tensor, step: int, steps: int, gradient: Callable[[Tensor, int], Tensor]) -> Tensor:
        """Compute submission ``step`` at ``theta``; with H local steps, theta - x of batches from step * H on."""
        if self._steps is None:
            return gradient(theta, step)
        if self._x is None:
            self._x = theta.clone()
            self._optimizer = self._inner([self._x])
        self._x.copy_(theta)
        for i in range(steps):
            self._x.grad = gradient(self._x, step * self._steps + i)
            self._optimizer.step()
        return theta - self._x


def replay(
    journal: Journal,
    parameters: Tensor,
    gradient: Callable[[Tensor, int, int, int], Tensor],
    outer: Outer,
    *,
    inner: Outer | None = None,
    on_update: Callable[[int], None] = lambda version: None,
) -> Tensor:
    """Repeat a run, and return the final weights.

    The bits are the same if its settings say ``deterministic``, or if it had one worker.

    Args:
        parameters: the weights at version 0, ``[D]``.
        gradient: (flat parameters, node, worker, number of the batch) -> flat gradient.
        outer: as in the run.
        inner: makes the optimizer of local steps from the weights; by default SGD with lr 0.05.
        on_update: called with the version after each update.

    Raises:
        ValueError: updates are missing; or the run was compressed or balanced its local steps, and the journal does not
            hold what is needed to repeat that.
    """
    settings = journal.settings
    for place, update in enumerate(journal.updates):
        if update.version != place:
            raise ValueError(
                f"the journal lacks the update that made version {place + 1}: a run can be replayed only from its start"
            )
    if settings.compress_up or settings.compress_down:
        raise ValueError("a run with compression cannot be replayed: the journal does not hold the residuals")
    if settings.balance:
        raise ValueError("a run with balanced local steps cannot be replayed: their numbers are not in the journal")
    weights = FlatWeights(parameters, outer, settings)
    history = {0: weights.snapshot}
    last_use = {row.base: update.version for update in journal.updates for part in update.parts for row in part.rows}
    work: dict[tuple[int, int], LocalWork] = {}

    def compute(part: Contribution, row: Row) -> Tensor:
        mine = work.setdefault((part.node, row.worker), LocalWork(settings.sync_every, inner))
        return mine.submission(
            history[row.base], row.step, settings.steps, lambda x, i: gradient(x, part.node, row.worker, i)
        )

    def total(part: Contribution, version: int) -> Any:
        if settings.transfer == "push":
            return compute(part, part.rows[0]) if part.rows else None
        buffer = Aggregator(settings.alpha, settings.deterministic)
        for row in part.rows:
            buffer.add(row, compute(part, row))
        return buffer.take(version)[1]

    for update in journal.updates:
        weights.apply([replace(part, tensor=total(part, update.version)) for part in update.parts])
        version = update.version + 1
        history[version] = weights.snapshot
        for old in [base for base in history if last_use.get(base, -1) < version and base != version]:
            del history[old]
        on_update(version)
    return weights.theta
