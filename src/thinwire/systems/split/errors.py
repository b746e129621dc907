"""What can go wrong between the two ends; each error is one sentence."""

from __future__ import annotations


class SplitError(RuntimeError):
    """Base class of this package's errors; the command line prints them and ends with exit code 1."""


class LinkError(SplitError):
    """The connection was refused, or lost and not re-established within the reconnect time."""


class LinkTimeout(LinkError):
    """The other end was silent for too long; names the step and what was expected."""


class SessionError(SplitError):
    """The two ends do not match, or one refused what the other sent. Trying again does not help."""
