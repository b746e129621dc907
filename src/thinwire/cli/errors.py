"""Which errors end a verb with one sentence, and with what exit code."""

from __future__ import annotations


class RunFailed(RuntimeError):
    """A verb whose words were right and whose run was not."""


def exit_code(error: Exception) -> int | None:
    """2 for wrong words, 1 for a run that failed in a way that thinwire names; None: a bug, which shows where it is."""
    if isinstance(error, ValueError):
        return 2
    ours = type(error).__module__.partition(".")[0] == "thinwire"
    return 1 if isinstance(error, RuntimeError) and ours else None
