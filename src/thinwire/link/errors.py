"""What goes wrong between two processes."""

from __future__ import annotations


class PairError(RuntimeError):
    """The other side has gone, or did not answer in time."""


class PairTimeout(PairError):
    """The other side was silent, or took nothing, until the time was over."""


class NotAdmitted(PairError):
    """The other side does not let this process in, or is not who it should be: another attempt would end the same."""
