"""What a run is told: one frozen dataclass, as JSON on the worker's command line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from thinwire.bench.rows import Row


@dataclass(frozen=True)
class BenchSpec:
    """One comparison.

    Attributes:
        model: as ``build_model`` reads it.
        rows: what is compared.
        workers: number of ranks.
        ranks_per_node: of them, how many share a node and its link.
        link: the user's words, or None for no limit; ``link_bits`` the same in bits per second.
        steps: timed steps of one row in one round.
        rounds: how often every row gets its turn.
        warmup: untimed steps before a row's first turn; later turns begin with one untimed step.
        loss_as: curves only: rows after the first train until they have its last loss, at most as many seconds as it.
        predict: also say what the planner predicts for each row.
        target: a held-out loss: rows train in turns of ``every`` steps, each until it is there or made ``steps``.
        every: curves and target only: steps between two points of the curve.
        operation_seconds: time-out of one collective.
        timeout_seconds: time-out of the whole run.
        rate_factor: times the learning rates of the model's optimizer.
    """

    model: str
    rows: tuple[Row, ...]
    workers: int = 2
    link: str | None = None
    link_bits: int | None = None
    steps: int = 10
    rounds: int = 3
    warmup: int = 3
    seed: int = 0
    curves: bool = False
    every: int = 5
    loss_as: bool = False
    operation_seconds: float = 300.0
    timeout_seconds: float = 3600.0
    predict: bool = False
    ranks_per_node: int = 1
    target: float | None = None
    rate_factor: float = 1.0

    def __post_init__(self) -> None:
        for name in ("workers", "ranks_per_node", "steps", "rounds", "warmup", "every"):
            least = 0 if name == "warmup" else 1
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.timeout_seconds <= 0 or self.operation_seconds <= 0:
            raise ValueError("time-outs must be positive")

    def to_json(self) -> str:
        """The spec as JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> BenchSpec:
        """Read back what ``to_json`` wrote."""
        data = json.loads(text)
        return cls(**{**data, "rows": tuple(Row(**row) for row in data["rows"])})
