"""Checks of arguments that more than one package makes, with one sentence each."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any


def check_count(name: str, value: Any, least: int = 1) -> int:
    """Return a whole number of at least ``least``.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
    return value


def check_number(
    name: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float = math.inf,
    below: float = math.inf,
) -> float:
    """Return a finite number of at least ``least``, greater than ``above``, at most ``most`` and less than ``below``.

    Raises:
        ValueError: it is something else.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    high = number and (least is None or value >= least) and (above is None or value > above)
    if high and value <= most and value < below:
        return float(value)
    limits = [
        *([f"at least {least:g}"] if least is not None else []),
        *([f"above {above:g}"] if above is not None else []),
        *([f"at most {most:g}"] if most < math.inf else []),
        *([f"below {below:g}"] if below < math.inf else []),
    ]
    raise ValueError(f"{name}={value!r} must be {' and '.join(['a finite number', *limits])}")


def check_choice(name: str, value: Any, choices: Collection[str]) -> str:
    """Return one of the choices.

    Raises:
        ValueError: it is none of them.
    """
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; use one of {', '.join(choices)}")
    return value
