"""What a run has done, round by round: as plain data, on disk with the server's state, and as a picture."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.core.durable import CheckpointDirectory, write_file
from thinwire.core.records import Record
from thinwire.systems.federated.data import MEDIAN, WORST
from thinwire.systems.federated.state import pack, unpack
from thinwire.tools.pictures import Level, Panel, Picture, Series

logger = logging.getLogger("thinwire")

TRAINING_LOSS = "training loss"  # the name of the clients' "loss" next to evaluated losses
_VERSIONS = "client versions"
_SHARES = ("accuracy", MEDIAN, WORST)


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """One round.

    Attributes:
        round: from 0.
        clients, samples: totals over the clients that answered.
        failed: client -> reason why it did not answer.
        metrics: means over the clients, weighted by samples: "loss" is that of local training.
        evaluation: what ``evaluate`` returned after this round; empty if it was not called.
        seconds: wall time, without evaluation and checkpoint.
        device_seconds: the makespan over devices: measured, or by the clock of ``speeds``.
        predicted_seconds: the fits' prediction of it; None before there are fits.
        schedule: equal, lpt or pull, per visit.
        busy_seconds: per device.
        client_seconds: the time the round would take on the clients' own devices, by the trace; None without a trace.
        bytes_up, bytes_down: sums to the server and payloads to the devices; with ranks, what this rank sent.
        control_bytes: plans, timings, collected values.
        client_bytes: what the clients alone would have sent; shows the effect of compression.
        lost_devices: devices whose clients others had to train.
    """

    round: int
    clients: int
    samples: int
    failed: Mapping[int, str]
    metrics: Mapping[str, float]
    evaluation: Mapping[str, float]
    seconds: float
    device_seconds: float
    predicted_seconds: float | None = None
    schedule: str
    busy_seconds: tuple[float, ...] = ()
    client_seconds: float | None = None
    bytes_up: int
    bytes_down: int
    control_bytes: int = 0
    client_bytes: int
    lost_devices: tuple[int, ...] = ()

    @property
    def numbers(self) -> dict[str, float]:
        """All measured numbers, by name."""
        means = {TRAINING_LOSS if name == "loss" else name: value for name, value in self.metrics.items()}
        return {**means, **self.evaluation}


@dataclass
class History(Record):
    """A run.

    Attributes:
        rounds: oldest first; after a resume, including those before it.
        start: what ``evaluate`` returned before the first round, for the untrained model.
        about: algorithm, devices, seed and so on, for display.
    """

    called: ClassVar[str] = "a history of a federated run"
    alone: ClassVar[bool] = False  # ``thinwire federated run --json`` prints more

    rounds: list[RoundRecord]
    start: Mapping[str, float]
    about: dict[str, Any]

    def add(self, record: RoundRecord, quietly: bool = False) -> None:
        """Append a round; unless ``quietly``, tell of the first one in which a client failed."""
        if record.failed and not quietly and not any(row.failed for row in self.rounds):
            client, why = next(iter(record.failed.items()))
            logger.warning(
                "thinwire: in round %d, %d of %d clients failed, and the average is without them; client %d, for one: "
                "%s. A client with the same data may fail in every round: mend its data or the loss, choose another "
                "batch_size (a last batch of one sample is too few for BatchNorm), or leave the client out. Later "
                "failures are only in the history (RoundRecord.failed)",
                record.round + 1, len(record.failed), len(record.failed) + record.clients, client, why,
            )  # fmt: skip
        self.rounds.append(record)


@dataclass(frozen=True)
class Checkpoint:
    """A complete round on disk: the server's tensors, and which client states are valid (None: there are none)."""

    round: int
    server: Mapping[str, Tensor]
    versions: Tensor | None
    history: History
    facts: Mapping[str, Any]

    def save(self, folder: Path) -> None:
        """Write it completely or not at all (one rename decides), and remove the previous one."""
        tensors = {**self.server, **({} if self.versions is None else {_VERSIONS: self.versions})}
        with CheckpointDirectory(folder, "round", keep=1).write(self.round) as partial:
            write_file(partial / "server.safetensors", pack(tensors))
            write_file(partial / "run.json", json.dumps({"facts": self.facts, "history": self.history.to_json()}))

    @classmethod
    def load(cls, folder: Path, facts: Mapping[str, Any]) -> Checkpoint | None:
        """Return the newest complete one; None if there is none. Refuse one of a run with other ``facts``."""
        found = CheckpointDirectory(folder, "round").found()
        if not found:
            return None
        done, path = list(found.items())[-1]
        run = json.loads((path / "run.json").read_text())
        for key in facts:
            if run["facts"].get(key) != facts[key]:
                raise ValueError(
                    f"{folder} contains a run with {key} = {run['facts'].get(key)}, but this one has {facts[key]}: "
                    "give the same, or another folder"
                )
        tensors = unpack((path / "server.safetensors").read_bytes())
        versions = tensors.pop(_VERSIONS, None)
        of_clients = None if versions is None else versions.to(torch.int32)
        return cls(done, tensors, of_clients, History.from_json(run["history"]), run["facts"])


def history_picture(runs: Mapping[str, History], title: str, chance: Mapping[str, float] | None = None) -> Picture:
    """Draw a panel for each evaluated number and the training loss, against rounds; the first also against seconds."""
    evaluated = sorted({number for history in runs.values() for row in history.rounds for number in row.evaluation})
    traced = any(row.client_seconds is not None for history in runs.values() for row in history.rounds)
    clock = "seconds on the clients' devices (trace)" if traced else "seconds"
    levels = {number: (Level(value, "chance"),) for number, value in (chance or {}).items()}
    panels: list[Panel] = []
    for number in (*evaluated, TRAINING_LOSS):
        points = {name: list(_points(history, number)) for name, history in runs.items()}
        limits = (0.0, 1.0) if number in _SHARES else None
        for axis, place in (("rounds", 0), (clock, 1))[: 1 if panels else 2]:
            lines = tuple(
                Series(name, tuple(point[place] for point in found), tuple(point[2] for point in found))
                for name, found in points.items()
            )
            panels.append(Panel(axis, number, lines, levels=levels.get(number, ()), y_range=limits))
    return Picture(title, tuple(panels))


def _points(history: History, number: str) -> Iterator[tuple[float, float, float]]:  # rounds, seconds, value
    if number in history.start:
        yield 0.0, 0.0, history.start[number]
    clock = 0.0
    for row in history.rounds:
        clock += row.client_seconds if row.client_seconds is not None else row.seconds
        if number in row.numbers:
            yield float(row.round + 1), clock, row.numbers[number]
