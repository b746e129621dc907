"""Checks of arguments that more than one package makes, with one sentence each."""

from __future__ import annotations

import difflib
import math
import operator
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

_ADDRESS = re.compile(r"[A-Za-z][\w+.-]+:/")  # a Path has made one slash of "://"


def check_count(name: str, value: Any, least: int = 1) -> int:
    """Return a whole number of at least ``least`` as an ``int``, NumPy's too."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
    return int(value)


def check_number(
    name: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float = math.inf,
    below: float = math.inf,
) -> float:
    """Return a finite number of at least ``least``, greater than ``above``, at most ``most`` and ``below`` a limit."""
    number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if (
        number
        and (least is None or value >= least)
        and (above is None or value > above)
        and value <= most
        and value < below
    ):
        return float(value)
    limits = [
        *([f"at least {least:g}"] if least is not None else []),
        *([f"above {above:g}"] if above is not None else []),
        *([f"at most {most:g}"] if most < math.inf else []),
        *([f"below {below:g}"] if below < math.inf else []),
    ]
    raise ValueError(f"{name}={value!r} must be {' and '.join(['a finite number', *limits])}")


def learning_rate(optimizer: Any, group: Mapping[str, Any], reader: str) -> Any:
    """Return the rate of a group of an optimizer; ``ValueError`` if it has none, which ``reader`` needs."""
    if group.get("lr") is None:
        raise ValueError(f"{reader} needs the learning rate, and {type(optimizer).__name__} has no lr")
    return group["lr"]


def check_choice(name: str, value: Any, choices: Collection[Any]) -> Any:
    if isinstance(value, bool) or value not in tuple(choices):
        known = [str(choice) for choice in choices]
        raise ValueError(f"{name}={value!r} is unknown; {meant(value, known)}use one of {', '.join(known)}")
    return value


def meant(word: object, known: Iterable[str]) -> str:
    """Return a question for an error message if a word is one of the known ones misspelt, otherwise nothing.

    Example:
        >>> meant("powersdg", ["acp", "powersgd"]), meant("nope", ["acp", "powersgd"])
        ("did you mean 'powersgd'? ", '')
    """
    close = difflib.get_close_matches(str(word).lower(), list(known), n=1)
    return f"did you mean {close[0]!r}? " if close else ""


def check_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False")
    return value


def check_sizes(sizes: Sequence[int]) -> list[int]:
    """Return the sizes as plain integers; raise ``ValueError`` if one is not a whole number or is negative."""
    checked = []
    for i, size in enumerate(sizes):
        try:
            whole = operator.index(size)
        except TypeError:
            raise ValueError(f"sizes[{i}] must be a whole number of elements, not {size!r}") from None
        if whole < 0:
            raise ValueError(f"sizes[{i}] must not be negative, got {whole}")
        checked.append(whole)
    return checked


def check_seconds(seconds: Sequence[float], count: int, name: str = "backward_seconds") -> list[float]:
    """Return the times as floats, one per tensor; raise ``ValueError`` if one is negative or not finite."""
    if len(seconds) != count:
        raise ValueError(f"{name} has {len(seconds)} entries where sizes has {count}")
    for i, value in enumerate(seconds):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name}[{i}] must be finite and not negative, got {value}")
    return [float(value) for value in seconds]


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return where a user's path leads, ``~`` too; ``ValueError`` for an address, such as ``s3://bucket/run``."""
    if _ADDRESS.match(os.fspath(path)):
        raise ValueError(f"{path} is an address, and files are kept in folders: mount that storage, or give a folder")
    return Path(path).expanduser()
