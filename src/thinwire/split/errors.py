"""What can go wrong between the two ends; each is one sentence."""

from __future__ import annotations


class SplitError(RuntimeError):
    """Base class of this package's errors; the command line prints it and ends with exit code 1."""


class FrameError(SplitError):
    """Bytes that are no frame of ours, or more of them than the limit allows. The connection is closed."""


class LinkError(SplitError):
    """The connection was lost or refused. Within the reconnect time the edge tries again."""


class LinkTimeout(LinkError):
    """The other end was silent for too long; names the step and what was waited for."""


class TrustError(LinkError):
    """A certificate or a TLS version that one end does not accept. Trying again does not help."""


class SessionError(SplitError):
    """The two ends do not fit together, or one of them refused what the other sent. Trying again does not help."""
