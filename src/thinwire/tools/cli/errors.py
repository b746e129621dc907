"""Which errors end a verb with one sentence, and with what exit code."""

from __future__ import annotations

import errno

from typer import BadParameter

_USAGE = BadParameter.__mro__[1]  # typer brings its own click, which has no public name
_FULL = (errno.ENOSPC, errno.EDQUOT)


class RunFailed(RuntimeError):
    """A verb whose options were valid but whose run failed."""


def exit_code(error: Exception) -> int | None:
    """Return 2 for invalid options, 1 for a run that failed in a known way; None for a bug, shown with a traceback."""
    if isinstance(error, OSError):
        return 1 if error.errno in _FULL else 2 if error.filename is not None else None
    if isinstance(error, _USAGE):
        return None if type(error).__name__ == "NoArgsIsHelpError" else 2
    if isinstance(error, ValueError):
        return 2
    ours = type(error).__module__.partition(".")[0] == "thinwire"
    return 1 if isinstance(error, RuntimeError) and ours else None


def sentence(error: Exception) -> str:
    """Return what to print about an error that has an exit code."""
    if isinstance(error, OSError):
        return ": ".join(filter(None, (error.filename and str(error.filename), error.strerror)))
    if isinstance(error, _USAGE):
        ctx = getattr(error, "ctx", None)
        words = error.format_message().partition(", unable to")[0].rstrip(".")  # type: ignore[attr-defined]
        return f"{words} (see {ctx.command_path if ctx else 'thinwire'} --help)"
    return str(error).strip().partition("\n")[0] if isinstance(error, ValueError) else str(error)
