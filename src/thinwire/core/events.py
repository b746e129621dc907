"""A process and the one that started it: its command, and its messages: lines of JSON after ``@@`` in its output."""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

_LAST = 15  # lines


def python(*arguments: str) -> list[str]:
    """Return the command that runs Python with ``arguments``, importing only from where this process does.

    By itself Python would import from the current directory first, where a file of the user may be called ``random.py``
    as one of its own. Before 3.11 it has no option against that.
    """
    elsewhere = {"", os.getcwd()}.isdisjoint(sys.path) and sys.version_info >= (3, 11)
    return [sys.executable, *(["-P"] if elsewhere else []), *arguments]


def tell_event(event: dict[str, Any]) -> None:
    """Print an event in one write, because other threads of this process print too."""
    print(f"@@{json.dumps(event)}\n", end="", flush=True)


def event_in(line: str) -> tuple[dict[str, Any] | None, str]:
    """Return the event with which a line begins, or None; and other output that got into the line."""
    if line.startswith("@@{"):
        try:
            event, end = json.JSONDecoder().raw_decode(line, 2)
            return event, line[end:]
        except ValueError:  # the line was cut in two
            pass
    return None, line


class LastWords:
    """Receives the ranks' lines: passes on their events, and keeps the last other lines for an error message."""

    def __init__(self, on_event: Callable[[int, dict[str, Any]], None]) -> None:
        self._on_event = on_event
        self._words = deque[str](maxlen=_LAST)

    def __call__(self, rank: int, line: str) -> None:
        event, text = event_in(line)
        if event is not None:
            self._on_event(rank, event)
        if text.strip():
            self._words.append(f"[{rank}] {text.rstrip()}")

    def after(self, what: str) -> str:
        return "\n".join([f"{what}; last output:", *self._words])
