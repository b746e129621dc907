"""Settings: one frozen record that turns the same two state machines into any of the published schemes."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import Any, NamedTuple

from thinwire.core.checks import check_count
from thinwire.core.records import UNREADABLE
from thinwire.systems.parameter_server.staleness import ALPHAS, LR_SCALES, NORMS, UNBOUNDED
from thinwire.systems.parameter_server.submit import Gradient, LocalSteps, Submission

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
    """The parts of ``update_every``.

    Attributes:
        nodes: whether nodes with new work are counted; otherwise gradients.
        number: how many are needed; None: those alive / ``divisor``.
    """

    nodes: bool
    number: int | None
    divisor: float


@dataclass(frozen=True)
class Settings:
    """How server and leaders behave. Plain data: the server sends it to every node, and all nodes follow it.

    Attributes:
        local_update: what a worker hands in: ``Gradient()`` or ``LocalSteps(...)``.
        transfer: "pull": the leader sums, the server asks for the sum; "push": each submission goes to the server.
        pull: which nodes an update asks for their sums: all with new work ("fresh"), or no more of them than it needs,
            the oldest work first ("stalest").
        update_every: what starts an update. ``3``: three gradients; ``"workers/2"``: floor(workers / 2) gradients (the
            rule of n-softsync); ``"nodes/2"``: floor(nodes / 2) nodes with new work; ``"3 nodes"``: three nodes, or all
            if there are fewer. ``"nodes"`` and ``"workers"`` mean all of them. Only those alive count, and at least one
            is always needed.
        max_staleness: S, the bound on staleness in versions; None: no bound.
        enforce: how the bound is kept. "wait": an update waits until it leaves out nothing older than S allows; "drop":
            older pushes are dropped.
        clock_limit: s of stale synchronous parallel: no node is more than s rounds ahead of the slowest.
        alpha: factor of a gradient as a function of its staleness, see :func:`staleness.alpha`.
        norm: the divisor: "one" counts gradients, "alpha" sums their factors.
        lr_scale: how the learning rate depends on the number of gradients in an update: "none", "linear", "sqrt".
        local: inside a node each worker works on its own ("async"), or all work in step ("sync").
        buffer: the most submissions of a leader, buffered and being computed; one per worker is always allowed.
        lease_seconds: a member that is silent for so long is dropped.
        start_nodes: the first weights are sent when that many nodes have joined.
        grace_seconds: how long an update waits for more nodes to finish.
        deterministic: contributions are added in the order (node, worker, step), in fp64.
        compress_up, compress_down: "topk" (the sender keeps the residual), "int8", or None.
        density: share of the elements that "topk" keeps.
        buffers: running means of batch norms and the like. "average": each node's mean goes to the server, which keeps
            a moving average, and all have it at the end; "local": each worker keeps its own.
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
                raise ValueError(f"{name}={value!r} is unknown; use one of {', '.join(map(repr, allowed))}")
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
            raise ValueError('pull="stalest" needs transfer="pull": what is pushed has already arrived')
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
        """How often a worker may start on the same weights."""
        return 1 if self.max_staleness == 0 or self.transfer == "push" else UNBOUNDED

    @property
    def channels(self) -> int:
        """The channels of a leader's connection.

        2: control messages overtake tensors. 1 if order matters: at S = 0 a FENCE must not overtake weights, and an IN
        must not overtake a pushed gradient.
        """
        return 2 if self.transfer == "pull" and self.max_staleness != 0 else 1

    @property
    def counts_nodes(self) -> bool:
        """Whether nodes are counted towards an update; otherwise gradients."""
        return _every(self.update_every).nodes

    def needed(self, alive: int) -> int:
        """Return how many make an update, given how many are ``alive`` (nodes if nodes are counted, else workers)."""
        nodes, number, divisor = _every(self.update_every)
        wanted = number if number is not None else int(alive / divisor)
        return max(1, min(wanted, alive) if nodes else wanted)

    def to_json(self) -> str:
        """Return one line of JSON; :meth:`from_json` reads it."""
        data = asdict(self)
        data["local_update"] = {"kind": type(self.local_update).__name__, **data["local_update"]}
        return json.dumps(data, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: the text does not hold settings.
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
        except UNREADABLE as error:
            raise ValueError(f"these are not settings of a parameter server: {error}") from error


@cache
def _every(words: int | str) -> Every:
    """Parse ``update_every``.

    Raises:
        ValueError: it has none of the valid forms, or divides by less than 1.
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
    """Translate the settings of an older journal, with ``submit``, ``limit`` and ``trigger``, to today's names."""
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
