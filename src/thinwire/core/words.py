"""Seconds, bytes and rates in words, each with three digits."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Return seconds in words.

    Example:
        >>> duration(2.5), duration(0.0312), duration(4.2e-5)
        ('2.5 s', '31.2 ms', '42 us')
    """
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} us"


def milliseconds(seconds: float) -> str:
    """Return seconds in milliseconds, however many, so that the figures of a table can be compared.

    Example:
        >>> milliseconds(2.5), milliseconds(0.0312), milliseconds(4.2e-5)
        ('2500 ms', '31.2 ms', '0.04 ms')
    """
    value = seconds * 1e3
    return f"{value:.0f} ms" if value >= 99.95 else f"{value:.1f} ms" if value >= 9.995 else f"{value:.2f} ms"


def size(count: float) -> str:
    """Return bytes in words, by powers of two.

    Example:
        >>> size(100), size(4096), size(25 << 20)
        ('100 B', '4 KiB', '25 MiB')
    """
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:g} B"


def rate(bytes_per_second: float) -> str:
    """Return bytes per second in words, as bits per second.

    Example:
        >>> rate(1.25e7), rate(3e9), rate(100.0)
        ('100 Mbit/s', '24 Gbit/s', '0.8 kbit/s')
    """
    bits = bytes_per_second * 8
    for unit, name in ((1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if bits >= unit:
            return f"{bits / unit:.3g} {name}"
    return f"{bits / 1e3:.3g} kbit/s"
