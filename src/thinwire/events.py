"""What a rank tells whoever started it: lines of JSON behind ``@@``, among all else that its libraries print."""

from __future__ import annotations

import json
from typing import Any


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
