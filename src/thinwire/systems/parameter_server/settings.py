"""Settings: one frozen record that turns the same two state machines into any of the published schemes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from thinwire.core.checks import check_choice, check_count, check_number
from thinwire.core.records import Record

UNBOUNDED = 1 << 62
"""Stands for infinity among versions, which are 64-bit integers."""

CODES = (None, "topk", "int8", "int4", "int2", "int1")
CHOICES: dict[str, tuple[Any, ...]] = {
    "transfer": ("pull", "push"),
    "enforce": ("wait", "drop"),
    "alpha": ("none", "inverse", "reciprocal", "invsqrt"),
    "compress_up": CODES,
    "compress_down": CODES,
    "buffers": ("average", "local"),
    "robust": (None, "clip"),
}
_EVERY = re.compile(r"(?P<number>[1-9]\d*) nodes|(?P<unit>nodes|workers)(/(?P<divisor>\d+(\.\d+)?))?")


def alpha(rule: str, tau: int) -> float:
    """Return the factor of a gradient that is ``tau`` versions old.

    "inverse" is that of arXiv 1511.05950, "invsqrt" that of FedBuff.

    Example:
        >>> [alpha("inverse", tau) for tau in (0, 1, 2, 4)], [alpha("reciprocal", tau) for tau in (0, 1, 3)]
        ([1.0, 1.0, 0.5, 0.25], [1.0, 0.5, 0.25])
    """
    if rule == "inverse":
        return 1.0 / max(tau, 1)
    if rule == "reciprocal":
        return 1.0 / (1 + tau)
    return 1.0 / math.sqrt(1 + tau) if rule == "invsqrt" else 1.0


@dataclass(frozen=True)
class Settings(Record):
    """How server and leaders behave. Plain data: the server sends it to every node, and all nodes follow it.

    Attributes:
        sync_every: H: a member hands in by how much H optimizer steps of its own have changed its weights (before minus
            after), see :class:`attached.ServerSync`. None: the gradient of one batch.
        balance: slower members make fewer of the H steps, at least 1, so that all take equally long (DyLU of
            asynchronous local SGD, arXiv 2401.09135).
        grace: seconds for which an update waits for more members once there are enough; whoever then still computes is
            merged into a later update, and all wait for the next weights. "auto": the 90th percentile of how much later
            than enough others came of late, at least 0.2 s and at most a round. None: it waits for nobody.
        robust: "clip": a contribution longer than 3 medians of recent ones is cut to that.
        transfer: "pull": the leader sums, the server asks for the sum; "push": each submission goes to the server.
        update_every: what starts an update. ``3``: three gradients; ``"workers/2"``: floor(workers / 2) gradients (the
            rule of n-softsync); ``"nodes/2"``: floor(nodes / 2) nodes with new work; ``"3 nodes"``: three nodes, or all
            if there are fewer. ``"nodes"`` and ``"workers"`` mean all of them. Only those alive count, and at least one
            is always needed.
        max_staleness: S, the bound on staleness in versions; None: no bound.
        enforce: how the bound is kept. "wait": an update waits until it leaves out nothing older than S allows; "drop":
            older pushes are dropped.
        clock_limit: s of stale synchronous parallel: no node is more than s rounds ahead of the slowest.
        alpha: factor of a gradient as a function of its staleness, see :func:`alpha`.
        buffer: the most submissions of a leader, buffered and being computed; one per worker is always allowed.
        lease_seconds: a member that is silent for so long is dropped, and one that makes no progress is not waited for
            any longer, unless submissions take more than an eighth of that.
        start_nodes: the first weights are sent when that many nodes have joined.
        deterministic: contributions are added in the order (node, worker, step), in fp64.
        compress_up, compress_down: "topk", 8, 4, 2 or 1 bits ("int8", ...; the sender keeps the residual), or None.
        density: share of the elements that "topk" keeps.
        buffers: running means of batch norms and the like. "average": each node's mean goes to the server, which keeps
            a moving average, and all have it at the end; "local": each worker keeps its own.
    """

    called = "a parameter server's settings"

    sync_every: int | None = None
    balance: bool = False
    grace: float | str | None = None
    robust: str | None = None
    transfer: str = "pull"
    update_every: int | str = "nodes/2"
    max_staleness: int | None = 4
    enforce: str = "wait"
    clock_limit: int | None = None
    alpha: str = "inverse"
    buffer: int = 8
    lease_seconds: float = 10.0
    start_nodes: int = 1
    deterministic: bool = False
    compress_up: str | None = None
    compress_down: str | None = None
    density: float = 0.01
    buffers: str = "average"

    def __post_init__(self) -> None:
        for name in CHOICES:
            check_choice(name, getattr(self, name), CHOICES[name])
        for name in ("max_staleness", "clock_limit"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), 0)
        check_count("buffer", self.buffer)
        check_count("start_nodes", self.start_nodes)
        if isinstance(self.update_every, str):
            _every(self.update_every)
        else:
            check_count("update_every", self.update_every)
        check_number("lease_seconds", self.lease_seconds, above=0)
        check_number("density", self.density, above=0, most=1)
        if self.sync_every is not None:
            check_count("sync_every", self.sync_every)
            if self.transfer == "pull":
                raise ValueError('sync_every needs transfer="push": changes of local steps are not summed by nodes')
        if self.grace is not None:
            if self.grace != "auto":
                check_number("grace", self.grace, least=0)
            if self.transfer == "pull" or self.max_staleness is not None or not self.counts_nodes:
                raise ValueError('grace needs transfer="push", max_staleness=None and update_every in nodes')
        if self.enforce == "drop" and self.transfer == "pull":
            raise ValueError('enforce="drop" needs transfer="push": a pulled sum mixes gradients of several ages')
        if self.enforce == "drop" and self.max_staleness is None:
            raise ValueError('enforce="drop" needs max_staleness: give the staleness above which a push is dropped')
        if self.clock_limit is not None and (self.transfer == "pull" or self.max_staleness is not None):
            raise ValueError('clock_limit (SSP) needs transfer="push" and max_staleness=None')
        if self.deterministic and (self.compress_up or self.compress_down):
            raise ValueError("deterministic=True sends sums whole, in fp64: leave compress_up and compress_down out")

    @property
    def bound(self) -> int:
        """S as a number."""
        return UNBOUNDED if self.max_staleness is None else self.max_staleness

    @property
    def steps(self) -> int:
        """Batches of a submission."""
        return self.sync_every or 1

    @property
    def holds(self) -> bool:
        """Whether whoever has pushed waits for the weights of the next update."""
        return self.max_staleness == 0 or self.grace is not None

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
        return _every(self.update_every)[0]

    def needed(self, alive: int) -> int:
        """Return how many make an update, given how many are ``alive`` (nodes if nodes are counted, else workers)."""
        nodes, number, divisor = _every(self.update_every)
        wanted = number if number is not None else int(alive / divisor)
        return max(1, min(wanted, alive) if nodes else wanted)


@cache
def _every(words: int | str) -> tuple[bool, int | None, float]:
    """Parse ``update_every``: are nodes counted, or gradients; how many, None: those alive / the divisor, >= 1."""
    if not isinstance(words, str):
        return False, words, 1.0
    found = _EVERY.fullmatch(words)
    divisor = float(found["divisor"] or 1) if found else 0.0
    if found is None or not 1 <= divisor < math.inf:
        raise ValueError(
            f'update_every={words!r} must be a number of gradients, "nodes", "workers", one of these divided by a '
            'number of at least 1 as in "nodes/2", or a number of nodes as in "3 nodes"'
        )
    return found["unit"] != "workers", int(found["number"]) if found["number"] else None, divisor
