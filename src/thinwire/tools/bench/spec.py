"""The settings of a run: one frozen dataclass, passed as JSON on the worker's command line."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

from thinwire.tools.bench.rows import Row


@dataclass(frozen=True)
class BenchSpec:
    """One comparison.

    Attributes:
        model: as ``build_model`` reads it.
        rows: the rows to compare.
        workers: number of ranks.
        ranks_per_node: number of ranks that share a node and its link.
        link: as the user wrote it, or None for no limit; ``link_bits`` is the same in bits per second.
        steps: timed steps of one row in one round.
        rounds: number of turns of every row.
        warmup: untimed steps before a row's first turn; later turns begin with one untimed step.
        loss_as: curves only: rows after the first train until they reach its last loss, for at most as many seconds.
        predict: also say what the planner predicts for each row.
        target: a held-out loss: rows train in turns of ``every`` steps, each until it reaches it or has made ``steps``.
        every: curves and target only: steps between two points of the curve.
        operation_seconds: time-out of one collective.
        timeout_seconds: time-out of the whole run.
        rate_factor: factor on the learning rates of the model's optimizer.
        device: "cpu" or "cuda", where the ranks compute.
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
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("workers", "ranks_per_node", "steps", "rounds", "warmup", "every"):
            least = 0 if name == "warmup" else 1
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if not (0 < self.timeout_seconds < math.inf and 0 < self.operation_seconds < math.inf):
            raise ValueError("time-outs must be positive and finite")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> BenchSpec:
        data = json.loads(text)
        return cls(**{**data, "rows": tuple(Row(**row) for row in data["rows"])})
