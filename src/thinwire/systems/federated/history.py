"""What a run has done, round by round, as plain data."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from thinwire.core.records import UNREADABLE

logger = logging.getLogger("thinwire")

TRAINING_LOSS = "training loss"
"""The name of the clients' "loss" next to evaluated losses."""


@dataclass(frozen=True)
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
    predicted_seconds: float | None
    schedule: str
    busy_seconds: tuple[float, ...]
    client_seconds: float | None
    bytes_up: int
    bytes_down: int
    control_bytes: int
    client_bytes: int
    lost_devices: tuple[int, ...] = ()

    @property
    def numbers(self) -> dict[str, float]:
        """All measured numbers, by name."""
        means = {TRAINING_LOSS if name == "loss" else name: value for name, value in self.metrics.items()}
        return {**means, **self.evaluation}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> RoundRecord:
        """Build a record from the JSON form of ``dataclasses.asdict``."""
        failed = {int(client): why for client, why in row["failed"].items()}
        busy, lost = tuple(row["busy_seconds"]), tuple(row["lost_devices"])
        return cls(**{**row, "failed": failed, "busy_seconds": busy, "lost_devices": lost})


@dataclass
class History:
    """A run.

    Attributes:
        rounds: oldest first; after a resume, including those before it.
        start: what ``evaluate`` returned before the first round, for the untrained model.
        about: algorithm, devices, seed and so on, for display.
    """

    rounds: list[RoundRecord] = field(default_factory=list)
    start: Mapping[str, float] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

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

    @property
    def evaluations(self) -> dict[int, Mapping[str, float]]:
        """The evaluations by round, for rounds that have one."""
        return {row.round: row.evaluation for row in self.rounds if row.evaluation}

    def to_json(self) -> str:
        rows = [asdict(row) for row in self.rounds]
        return json.dumps({"about": self.about, "start": dict(self.start), "rounds": rows})

    @classmethod
    def from_json(cls, text: str) -> History:
        """Read what ``to_json`` wrote.

        Raises:
            ValueError: the text is something else.
        """
        try:
            data: Any = json.loads(text)
            rows = [RoundRecord.from_dict(row) for row in data["rounds"]]
            return cls(rows, dict(data.get("start", {})), dict(data["about"]))
        except UNREADABLE as error:
            raise ValueError(f"this is not a history of a federated run: {error}") from error
