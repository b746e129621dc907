"""The syntax of the command line, ``name:option=value:option=value``, and suggestions for misspelled names."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping

Value = bool | int | float | str


def value(text: str) -> Value:
    """Parse an option's value: a bool, an int, a finite float, or else the text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float) if text.isascii() else ():
        try:
            if math.isfinite(number := kind(text)):
                return number
        except (ValueError, OverflowError):
            continue
    return text


def split_options(text: str) -> tuple[str, dict[str, Value]]:
    """Parse ``"acp:rank=4"`` as ``("acp", {"rank": 4})``; parts without ``=`` belong to the name.

    Raises:
        ValueError: an option without a name or a value, or followed by more of the name.
    """
    name, *parts = text.strip().split(":")
    options: dict[str, Value] = {}
    for part in parts:
        if "=" not in part and not options:
            name += f":{part}"
            continue
        key, found, given = part.partition("=")
        if not found or not key.strip() or not given.strip():
            raise ValueError(f"{text!r}: {part!r} is not an option; use name:option=value, such as acp:rank=4")
        options[key.strip()] = value(given.strip())
    return name.strip(), options


def arguments(name: str, options: Mapping[str, Value]) -> str:
    """Format as arguments of a Python call: ``"acp", rank=4``."""
    return ", ".join([f'"{name}"', *(f"{key}={given!r}" for key, given in options.items())])


def attach_line(name: str, options: Mapping[str, Value]) -> str:
    """Return the line to write into a script."""
    return f"sync = tw.attach(model, optimizer, {arguments(name, options)})"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message: the nearest known name, and all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    return (f"did you mean {close[0]!r}? " if close else "") + "known: " + ", ".join(known)
