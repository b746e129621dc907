"""Settings: one frozen record that turns the same two state machines into each of the published schemes."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import Any, NamedTuple

from thinwire.methods.base import check_count
from thinwire.parameter_server.staleness import ALPHAS, LR_SCALES, NORMS, UNBOUNDED
from thinwire.parameter_server.submit import Gradient, LocalSteps, Submission

CHOICES: dict[str, tuple[Any, ...]] = {
    "transfer": ("pull", "push"),
    "pull": ("fresh", "stalest"),
    "enforce": ("wait", "drop"),
    "alpha": ALPHAS,
    "norm": NORMS,
    "lr_scale": LR_SCALES,
    "local": ("async", "sync"),
    "compress_up": (None, "topk", "int8"),
    "compress_down": (None, "topk", "int8"),
    "buffers": ("average", "local"),
}


_EVERY = re.compile(r"(?P<number>[1-9]\d*) nodes|(?P<unit>nodes|workers)(/(?P<divisor>\d+(\.\d+)?))?")


class Every(NamedTuple):
    """``update_every`` taken apart.

    Attributes:
        nodes: whether nodes with fresh work are counted; else gradients.
        number: of them; None: those alive / ``divisor``.
    """

    nodes: bool
    number: int | None
    divisor: float


@dataclass(frozen=True)
class Settings:
    """How server and leaders behave. Plain data: the server publishes it and every node follows it.

    Attributes:
        local_update: what a worker hands in: ``Gradient()`` or ``LocalSteps(...)``.
        transfer: "pull": the leader sums, the server asks for the sum; "push": each submission goes to the server.
        pull: whom an update asks for its sum: all nodes with new work ("fresh"), or of these no more than it
            needs, the oldest work first ("stalest").
        update_every: what makes an update. ``3``: three gradients; ``"workers/2"``: floor(workers / 2) gradients (the
            rule of n-softsync); ``"nodes/2"``: floor(nodes / 2) nodes with fresh work; ``"3 nodes"``: three nodes, or
            all if there are fewer. ``"nodes"`` and ``"workers"`` are all of them; those alive count, and one is always
            needed.
        max_staleness: S, the bound on staleness in versions; None: no bound.
        enforce: what keeps the bound. "wait": an update waits until nothing older than S stays behind; "drop": older
            pushes are dropped.
        clock_limit: s of stale synchronous parallel: no node is more than s rounds ahead of the slowest.
        alpha: factor of a gradient by its staleness, see :func:`staleness.alpha`.
        norm: divisor: "one" counts gradients, "alpha" their factors.
        lr_scale: rate by the gradients in an update: "none", "linear", "sqrt".
        local: inside a node each worker on its own ("async"), or all in step ("sync").
        buffer: most submissions a leader holds, computed and running; at least one per worker is always allowed.
        lease_seconds: a member that is silent for so long is dropped.
        start_nodes: the first weights wait for that many nodes.
        grace_seconds: an update waits so long for more who have finished.
        deterministic: contributions are added in the order (node, worker, step), in fp64.
        compress_up, compress_down: "topk" (residual kept where it is sent), "int8", or None.
        density: kept share of "topk".
        buffers: running means of batch norms and the like: "average": each node's mean goes to the server, which keeps
            a moving average, and all have it in the end; "local": each worker keeps its own.
    """

    local_update: Submission = field(default_factory=Gradient)
    transfer: str = "pull"
    pull: str = "fresh"
    update_every: int | str = "nodes/2"
    max_staleness: int | None = 4
    enforce: str = "wait"
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
        for name, least in (("max_staleness", 0), ("clock_limit", 0), ("buffer", 1), ("start_nodes", 1)):
            value = getattr(self, name)
            if value is not None or name in ("buffer", "start_nodes"):
                check_count(name, value, least)
        if isinstance(self.update_every, str):
            _every(self.update_every)
        else:
            check_count("update_every", self.update_every, 1)
        if not (_is_number(self.lease_seconds) and self.lease_seconds > 0):
            raise ValueError(f"lease_seconds={self.lease_seconds!r} must be a number above 0")
        if not (_is_number(self.grace_seconds) and self.grace_seconds >= 0):
            raise ValueError(f"grace_seconds={self.grace_seconds!r} must be a number of at least 0")
        if not (_is_number(self.density) and 0 < self.density <= 1):
            raise ValueError(f"density={self.density!r} must be a number above 0 and at most 1")
        if not isinstance(self.local_update, (Gradient, LocalSteps)):
            raise ValueError(f"local_update={self.local_update!r} must be Gradient() or LocalSteps()")
        self._check_together()

    def _check_together(self) -> None:
        if self.pull == "stalest" and self.transfer == "push":
            raise ValueError('pull="stalest" needs transfer="pull": what is pushed has come already')
        if self.enforce == "drop" and self.transfer == "pull":
            raise ValueError('enforce="drop" needs transfer="push": a pulled sum mixes gradients of several ages')
        if self.enforce == "drop" and self.max_staleness is None:
            raise ValueError('enforce="drop" needs max_staleness: give the staleness above which a push is dropped')
        if self.clock_limit is not None and (self.transfer == "pull" or self.max_staleness is not None):
            raise ValueError('clock_limit (SSP) needs transfer="push" and max_staleness=None')
        if self.local == "sync" and isinstance(self.local_update, LocalSteps):
            raise ValueError('local="sync" averages gradients each step: use local="async" with LocalSteps')
        if self.local == "sync" and self.transfer == "push":
            raise ValueError('local="sync" sums in the leader: use transfer="pull"')
        if self.deterministic and (self.compress_up or self.compress_down):
            raise ValueError("deterministic=True sends sums whole, in fp64: leave compress_up and compress_down out")

    @property
    def bound(self) -> int:
        """S as a number."""
        return UNBOUNDED if self.max_staleness is None else self.max_staleness

    @property
    def starts_per_version(self) -> int:
        """How often a worker may start on one copy of the weights."""
        return 1 if self.max_staleness == 0 or self.transfer == "push" else UNBOUNDED

    @property
    def channels(self) -> int:
        """2: control overtakes tensors. 1 where order matters: a FENCE may not overtake weights at S = 0, nor an IN a
        pushed gradient."""
        return 2 if self.transfer == "pull" and self.max_staleness != 0 else 1

    @property
    def counts_nodes(self) -> bool:
        """Whether nodes are counted towards an update; else gradients."""
        return _every(self.update_every).nodes

    def needed(self, alive: int) -> int:
        """How many make an update among that many ``alive`` (nodes where nodes are counted, else workers)."""
        nodes, number, divisor = _every(self.update_every)
        wanted = number if number is not None else int(alive / divisor)
        return max(1, min(wanted, alive) if nodes else wanted)

    def to_json(self) -> str:
        """One line of JSON; :meth:`from_json` reads it back."""
        data = asdict(self)
        data["local_update"] = {"kind": type(self.local_update).__name__, **data["local_update"]}
        return json.dumps(data, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: it is not that.
        """
        try:
            data = _renamed(dict(json.loads(text)))
            update = dict(data.pop("local_update"))
            kind = update.pop("kind")
            kinds = {"Gradient": Gradient, "LocalSteps": LocalSteps}
            unknown = set(data) - {f.name for f in fields(cls)}
            if unknown or kind not in kinds:
                raise ValueError(f"unknown fields {sorted(unknown)} or submission {kind!r}")
            return cls(local_update=kinds[kind](**update), **data)
        except (KeyError, RecursionError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"these are no settings of a parameter server: {error}") from error


@cache
def _every(words: int | str) -> Every:
    """Take ``update_every`` apart.

    Raises:
        ValueError: it is none of its forms, or divides by less than 1.
    """
    if not isinstance(words, str):
        return Every(False, words, 1.0)
    found = _EVERY.fullmatch(words)
    divisor = float(found["divisor"] or 1) if found else 0.0
    if found is None or not 1 <= divisor < math.inf:
        raise ValueError(
            f'update_every={words!r} must be a number of gradients, "nodes", "workers", one of these divided by a '
            'number of at least 1 as in "nodes/2", or a number of nodes as in "3 nodes"'
        )
    return Every(found["unit"] != "workers", int(found["number"]) if found["number"] else None, divisor)


def _renamed(data: dict[str, Any]) -> dict[str, Any]:
    """Settings of a journal from before, with ``submit``, ``limit`` and ``trigger``, in the words of today."""
    if "submit" not in data:
        return data
    nodes, n, count = data.pop("trigger", "nodes") == "nodes", data.pop("n", 2.0), data.pop("count", None)
    if count is None:
        data["update_every"] = f"{'nodes' if nodes else 'workers'}/{n}"
    else:
        data["update_every"] = f"{count} nodes" if nodes else count
    data["local_update"], data["max_staleness"] = data.pop("submit"), data.pop("limit", 4)
    if data.get("enforce") == "gate":
        data["enforce"] = "wait"
    return data


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
