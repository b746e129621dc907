"""Which errors end a verb with one sentence, and with what exit code."""

from __future__ import annotations


class RunFailed(RuntimeError):
    """A verb whose options were valid but whose run failed."""


def exit_code(error: Exception) -> int | None:
    """Return 2 for invalid options, 1 for a run that failed in a known way; None for a bug, shown with a traceback."""
    if isinstance(error, ValueError):
        return 2
    ours = type(error).__module__.partition(".")[0] == "thinwire"
    return 1 if isinstance(error, RuntimeError) and ours else None
