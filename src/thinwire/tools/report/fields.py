"""Typed access to JSON from elsewhere: missing values and wrong types give an error of one sentence."""

from __future__ import annotations

import json
import math
from typing import Any, TypeAlias

Data: TypeAlias = dict[str, Any]


def parsed(text: str) -> Any:
    """Return JSON's content; a whole number that no float can hold is infinite."""
    return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 300 else float(digits))


def table(value: Any, what: str) -> Data:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not a JSON object")
    return value


def listed(data: Data, key: str) -> list[Any]:
    value = data.get(key)
    if not isinstance(value, list):
        raise ValueError(f"{key!r} is not a list")
    return value


def tables(data: Data, key: str) -> list[Data]:
    return [table(entry, f"an entry of {key!r}") for entry in listed(data, key)]


def number(data: Data, key: str) -> float:
    found = maybe_number(data, key)
    if found is None:
        raise ValueError(f"{key!r} is not a number")
    return found


def maybe_number(data: Data, key: str) -> float | None:
    """Return a finite number; None if there is none or it is not finite."""
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        if value is None:
            return None
        raise ValueError(f"{key!r} is not a number")
    return float(value) if math.isfinite(value) else None


def text(data: Data, key: str) -> str:
    value = data.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{key!r} is not text")
    return value
