"""What a rank tells whoever started it: lines of JSON behind ``@@``, among all else that its libraries print."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from typing import Any

_LAST = 15  # lines


def tell_event(event: dict[str, Any]) -> None:
    """In one write, as other threads of this process print too."""
    print(f"@@{json.dumps(event)}\n", end="", flush=True)


def event_in(line: str) -> tuple[dict[str, Any] | None, str]:
    """The event with which a line begins, or None; and what somebody else has printed into it."""
    if line.startswith("@@{"):
        try:
            event, end = json.JSONDecoder().raw_decode(line, 2)
            return event, line[end:]
        except ValueError:  # it was cut in two
            pass
    return None, line


class LastWords:
    """Hears the lines of ranks: hands on their events, and keeps the last of what else they print, for an error.

    Args:
        on_event: (rank, event).
    """

    def __init__(self, on_event: Callable[[int, dict[str, Any]], None]) -> None:
        self._on_event = on_event
        self._words = deque[str](maxlen=_LAST)

    def __call__(self, rank: int, line: str) -> None:
        """One line of a rank."""
        event, text = event_in(line)
        if event is not None:
            self._on_event(rank, event)
        if text.strip():
            self._words.append(f"[{rank}] {text.rstrip()}")

    def after(self, what: str) -> str:
        """What has happened, and under it the last lines."""
        return "\n".join([f"{what}; last words:", *self._words])
