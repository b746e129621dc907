"""The one exception of this package."""

from __future__ import annotations


class LabError(ValueError):
    """The lab cannot do what was requested; the message is one sentence for the user."""
