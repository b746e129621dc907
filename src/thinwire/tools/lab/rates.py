"""Link rates and delays in the syntax of ``tc``."""

from __future__ import annotations

import re
from decimal import Decimal

from thinwire.tools.lab.errors import LabError

_BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}
_SECONDS = {"us": Decimal("1e-6"), "ms": Decimal("1e-3"), "s": Decimal(1)}
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)([a-z/]*)")

SLOWEST = 100 * 10**3
FASTEST = 10**12
LONGEST_DELAY = 10.0


def parse_rate(text: str) -> int:
    """Parse a link rate.

    Args:
        text: a number and ``bit``, ``kbit``, ``mbit``, ``gbit`` or ``tbit``, such as ``100mbit`` or ``2.5gbit``.

    Returns:
        Bits per second.

    Raises:
        LabError: the text is not a rate, or is outside 100kbit to 1tbit.
    """
    if "," in text and all(one.strip().lower().endswith("bit") for one in text.split(",")):
        raise LabError(f"link rate {text!r} is several, and here all links have the same one: give the slowest")
    match = _QUANTITY.fullmatch(text.strip().lower())
    number, unit = match.groups() if match else ("", "")
    if unit.endswith("bps"):
        meant = unit.removesuffix("bps") + "bit"
        raise LabError(
            f"link rate {text!r} is ambiguous ('bps' means bytes in tc, bits elsewhere): use {number}{meant}"
        )
    if unit not in _BITS:
        raise LabError(f"link rate {text!r} is not a number with bit, kbit, mbit, gbit or tbit: use 100mbit or 2.5gbit")
    rate = int(Decimal(number) * _BITS[unit])
    check_rate(rate, text)
    return rate


def check_rate(rate: int, text: str | None = None) -> None:
    """Raise `LabError` unless the rate (bits per second) is one that the lab can emulate."""
    if not SLOWEST <= rate <= FASTEST:
        raise LabError(
            f"link rate {text or format_rate(rate)!r} is outside {format_rate(SLOWEST)} to {format_rate(FASTEST)}: "
            "use for example 1gbit, or unlimited"
        )


def format_rate(rate: int | None) -> str:
    """Format bits per second as ``tc`` does (``1gbit``), so that `parse_rate` can read it; None gives ``unlimited``."""
    if rate is None:
        return "unlimited"
    for unit in ("tbit", "gbit", "mbit", "kbit"):
        value = Decimal(rate) / _BITS[unit]
        if value >= 1 and value == round(value, 3):
            return f"{value.normalize():f}{unit}"
    return f"{rate}bit"


def parse_delay(text: str) -> float:
    """Parse a delay such as ``200us``, ``1ms`` or ``0.05s``.

    Returns:
        Seconds.

    Raises:
        LabError: the text is not a delay, or longer than ten seconds.
    """
    match = _QUANTITY.fullmatch(text.strip().lower())
    number, unit = match.groups() if match else ("", "")
    if number and Decimal(number) == 0 and not unit:
        return 0.0
    if unit not in _SECONDS:
        raise LabError(f"delay {text!r} is not a number with us, ms or s: use for example 1ms")
    seconds = float(Decimal(number) * _SECONDS[unit])
    if seconds > LONGEST_DELAY:
        raise LabError(f"delay {text!r} is longer than {LONGEST_DELAY:.0f}s: use for example 1ms")
    return seconds
