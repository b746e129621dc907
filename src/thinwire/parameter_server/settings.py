"""Settings: one frozen record that turns the same two state machines into each of the published schemes."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from thinwire.methods.base import check_count
from thinwire.parameter_server.staleness import ALPHAS, LR_SCALES, NORMS, UNBOUNDED
from thinwire.parameter_server.submit import Gradient, LocalSteps, Submission

CHOICES: dict[str, tuple[Any, ...]] = {
    "transfer": ("pull", "push"),
    "pull": ("fresh", "stalest"),
    "trigger": ("nodes", "gradients"),
    "enforce": ("gate", "drop"),
    "alpha": ALPHAS,
    "norm": NORMS,
    "lr_scale": LR_SCALES,
    "local": ("async", "sync"),
    "compress_up": (None, "topk", "int8"),
    "compress_down": (None, "topk", "int8"),
    "buffers": ("average", "local"),
}


@dataclass(frozen=True)
class Settings:
    """How server and leaders behave. Plain data: the server publishes it and every node follows it.

    Attributes:
        submit: what a worker hands in.
        transfer: "pull": the leader sums, the server asks for the sum; "push": each submission goes to the server.
        pull: whom an update asks for its sum: all nodes with new work ("fresh"), or of these no more than the trigger
            needs, the oldest work first ("stalest").
        trigger: what is counted towards an update: "nodes" with fresh work, or "gradients".
        n: the second-level rule of n-softsync: an update takes floor(alive / n).
        count: so many instead of floor(alive / n).
        limit: S, the bound on staleness in versions; None: no bound.
        enforce: "gate": an update waits until nothing older than S stays behind; "drop": older pushes are dropped.
        clock_limit: s of stale synchronous parallel: no node is more than s rounds ahead of the slowest.
        alpha: factor of a gradient by its staleness, see :func:`staleness.alpha`.
        norm: divisor: "one" counts gradients, "alpha" their factors.
        lr_scale: rate by the gradients in an update: "none", "linear", "sqrt".
        local: inside a node each worker on its own ("async"), or all in step ("sync").
        buffer: most submissions a leader holds, computed and running; at least one per worker is always allowed.
        lease_seconds: a member that is silent for so long is dropped.
        start_nodes: the first weights wait for so many nodes.
        grace_seconds: an update waits so long for more who have finished.
        deterministic: contributions are added in the order (node, worker, step), in fp64.
        compress_up, compress_down: "topk" (residual kept where it is sent), "int8", or None.
        density: kept share of "topk".
        buffers: running means of batch norms and the like: "average": each node's mean goes to the server, which keeps
            a moving average, and all have it in the end; "local": each worker keeps its own.
    """

    submit: Submission = field(default_factory=Gradient)
    transfer: str = "pull"
    pull: str = "fresh"
    trigger: str = "nodes"
    n: float = 2.0
    count: int | None = None
    limit: int | None = 4
    enforce: str = "gate"
    clock_limit: int | None = None
    alpha: str = "inverse"
    norm: str = "one"
    lr_scale: str = "none"
    local: str = "async"
    buffer: int = 8
    lease_seconds: float = 10.0
    start_nodes: int = 1
    grace_seconds: float = 0.0
    deterministic: bool = False
    compress_up: str | None = None
    compress_down: str | None = None
    density: float = 0.01
    buffers: str = "average"

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name}={value!r} is unknown; there is {', '.join(map(repr, allowed))}")
        for name, least in (("count", 1), ("limit", 0), ("clock_limit", 0), ("buffer", 1), ("start_nodes", 1)):
            value = getattr(self, name)
            if value is not None or name in ("buffer", "start_nodes"):
                check_count(name, value, least)
        if not (_is_number(self.n) and self.n >= 1):
            raise ValueError(f"n={self.n!r} must be a number of at least 1")
        if not (_is_number(self.lease_seconds) and self.lease_seconds > 0):
            raise ValueError(f"lease_seconds={self.lease_seconds!r} must be a number above 0")
        if not (_is_number(self.grace_seconds) and self.grace_seconds >= 0):
            raise ValueError(f"grace_seconds={self.grace_seconds!r} must be a number of at least 0")
        if not (_is_number(self.density) and 0 < self.density <= 1):
            raise ValueError(f"density={self.density!r} must be a number above 0 and at most 1")
        if not isinstance(self.submit, (Gradient, LocalSteps)):
            raise ValueError(f"submit={self.submit!r} must be Gradient() or LocalSteps()")
        self._check_together()

    def _check_together(self) -> None:
        if self.pull == "stalest" and self.transfer == "push":
            raise ValueError('pull="stalest" needs transfer="pull": what is pushed has come already')
        if self.enforce == "drop" and self.transfer == "pull":
            raise ValueError('enforce="drop" needs transfer="push": a pulled sum mixes gradients of several ages')
        if self.enforce == "drop" and self.limit is None:
            raise ValueError('enforce="drop" needs a limit: give the staleness above which a push is dropped')
        if self.clock_limit is not None and (self.transfer == "pull" or self.limit is not None):
            raise ValueError('clock_limit (SSP) needs transfer="push" and limit=None')
        if self.local == "sync" and isinstance(self.submit, LocalSteps):
            raise ValueError('local="sync" averages gradients each step: use local="async" with LocalSteps')
        if self.local == "sync" and self.transfer == "push":
            raise ValueError('local="sync" sums in the leader: use transfer="pull"')
        if self.deterministic and (self.compress_up or self.compress_down):
            raise ValueError("deterministic=True sends sums whole, in fp64: leave compress_up and compress_down out")

    @property
    def bound(self) -> int:
        """S as a number."""
        return UNBOUNDED if self.limit is None else self.limit

    @property
    def starts_per_version(self) -> int:
        """How often a worker may start on one copy of the weights."""
        return 1 if self.limit == 0 or self.transfer == "push" else UNBOUNDED

    @property
    def channels(self) -> int:
        """2: control overtakes tensors. 1 where order matters: a FENCE may not overtake weights at S = 0, nor an IN a
        pushed gradient."""
        return 2 if self.transfer == "pull" and self.limit != 0 else 1

    def needed(self, alive: int) -> int:
        """The trigger count c among ``alive`` units (nodes, or workers for "gradients")."""
        count = self.count if self.count is not None else int(alive / self.n)
        return max(1, min(count, alive) if self.trigger == "nodes" else count)

    def to_json(self) -> str:
        """One line of JSON; :meth:`from_json` reads it back."""
        data = asdict(self)
        data["submit"] = {"kind": type(self.submit).__name__, **data["submit"]}
        return json.dumps(data, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: it is not that.
        """
        try:
            data = dict(json.loads(text))
            submit = dict(data.pop("submit"))
            kind = submit.pop("kind")
            kinds = {"Gradient": Gradient, "LocalSteps": LocalSteps}
            unknown = set(data) - {f.name for f in fields(cls)}
            if unknown or kind not in kinds:
                raise ValueError(f"unknown fields {sorted(unknown)} or submission {kind!r}")
            return cls(submit=kinds[kind](**submit), **data)
        except (KeyError, RecursionError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"these are no settings of a parameter server: {error}") from error


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
