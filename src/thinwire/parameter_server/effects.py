"""What a state machine asks its driver to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from thinwire.parameter_server.messages import Message, Row


@dataclass(frozen=True)
class Send:
    """Send a message; ``member`` says to whom (the server's effects), in order with all others of its channel."""

    message: Message
    member: int = 0


@dataclass(frozen=True)
class Report:
    """An IN is due: compose it (``Leader.report``) at the moment when the control channel is free, not earlier."""


@dataclass(frozen=True)
class Start:
    """A worker begins: ``steps`` batches, from ``step`` on, at the weights of ``version``."""

    worker: int
    version: int
    step: int
    steps: int
    token: int


@dataclass(frozen=True)
class Join:
    """Say HELLO (again): the membership has ended."""

    reason: str


@dataclass(frozen=True)
class Leave:
    """Training has ended, or the leader is to stop."""

    version: int


@dataclass(frozen=True)
class GiveUp:
    """The server does not take this leader in: end, with this sentence."""

    reason: str


@dataclass(frozen=True)
class Refuse:
    """Tell who asked to become a member, and is none, why not (``messages.REASONS``)."""

    node: int
    instance: int
    reason: int


@dataclass(frozen=True)
class Contribution:
    """A sum that an update takes.

    Attributes:
        node, member: whose.
        rows: the gradients in it.
        scale: factor of the tensor.
        weight: what it adds to the divisor.
        tensor: the sum, None where all were dropped or the machines run without tensors.
    """

    node: int
    member: int
    rows: tuple[Row, ...]
    scale: float
    weight: float
    tensor: Any


@dataclass(frozen=True)
class Apply:
    """Make an update of ``version``, then call ``applied``."""

    version: int
    contributions: tuple[Contribution, ...]


@dataclass(frozen=True)
class Drop:
    """A sum that has come is not used: whoever holds its tensor may let it go."""

    tensor: Any


@dataclass(frozen=True)
class Forget:
    """A member has gone: close its channel."""

    member: int
    reason: str


@dataclass(frozen=True)
class Log:
    """Something worth a line."""

    event: str
    facts: dict[str, Any] = field(default_factory=dict)


Effect = Send | Report | Start | Join | Leave | GiveUp | Refuse | Apply | Drop | Forget | Log
