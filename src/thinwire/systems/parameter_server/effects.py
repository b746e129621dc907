"""What a state machine asks its driver to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from thinwire.systems.parameter_server.messages import Message, Row


@dataclass(frozen=True)
class Send:
    """Send a message, in order with all others of its channel; in the server's effects ``member`` is the receiver."""

    message: Message
    member: int = 0


@dataclass(frozen=True)
class Report:
    """An IN is due: compose it (``Leader.report``) when the control channel is free, not earlier."""


@dataclass(frozen=True)
class Start:
    """Let a worker compute ``steps`` batches, from ``step`` on, with the weights of ``version``."""

    worker: int
    version: int
    step: int
    steps: int
    token: int


@dataclass(frozen=True)
class Join:
    """Say HELLO (again), because there is no membership (any more). ``reason``: of its end; empty if there was none."""

    reason: str


@dataclass(frozen=True)
class Leave:
    """Training has ended, or the leader is to stop."""

    version: int


@dataclass(frozen=True)
class GiveUp:
    """The server refuses this leader: end with ``reason``."""

    reason: str


@dataclass(frozen=True)
class Refuse:
    """Refuse a process that asked to become a member, and say why (``messages.REASONS``)."""

    node: int
    instance: int
    reason: int


@dataclass(frozen=True)
class Contribution:
    """A sum in an update: ``scale`` times its tensor, if it has one."""

    node: int
    member: int
    rows: tuple[Row, ...]
    scale: float
    tensor: Any = None


@dataclass(frozen=True)
class Apply:
    """Make an update from ``version`` to the next, then call ``applied``."""

    version: int
    contributions: tuple[Contribution, ...]


@dataclass(frozen=True)
class Drop:
    """A received sum will not be used; its tensor may be freed."""

    tensor: Any


@dataclass(frozen=True)
class Forget:
    """A member has gone: close its connection."""

    member: int


Effect = Send | Report | Start | Join | Leave | GiveUp | Refuse | Apply | Drop | Forget
