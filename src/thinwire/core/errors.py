"""Errors between two processes."""

from __future__ import annotations


class PairError(RuntimeError):
    """The other side has gone, or did not answer in time."""


class PairTimeout(PairError):
    """The other side sent or accepted nothing before the deadline."""


class NotAdmitted(PairError):
    """The other side refuses this process, or is not who it should be; trying again would give the same result."""
