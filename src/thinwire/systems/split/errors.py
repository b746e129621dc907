"""What can go wrong between the two ends; each error is one sentence."""

from __future__ import annotations


class SplitError(RuntimeError):
    """Base class of this package's errors; the command line prints them and ends with exit code 1."""


class FrameError(SplitError):
    """Bytes that are not a valid frame, or more of them than the limit allows. The connection is closed."""


class LinkError(SplitError):
    """The connection was lost or refused. The edge tries again within the reconnect time."""


class LinkTimeout(LinkError):
    """The other end was silent for too long; names the step and what was expected."""


class TrustError(LinkError):
    """One end does not accept the other's certificate or TLS version. Trying again does not help."""


class SessionError(SplitError):
    """The two ends do not match, or one refused what the other sent. Trying again does not help."""
