"""Seconds, bytes, rates and factors in words; of a table, with as many digits as make its rows comparable."""

from __future__ import annotations


def duration(seconds: float | None) -> str:
    """Return seconds in words, of a message, a step or a whole run.

    Example:
        >>> [duration(seconds) for seconds in (4.2e-5, 0.0031, 0.0553, 1.2, 12.34, 310.0, 9000.0, None)]
        ['42 us', '3.1 ms', '55 ms', '1.20 s', '12.3 s', '310 s', '2.5 h', '-']
    """
    if seconds is None:
        return "-"
    size = abs(seconds)
    if 0 < size < 9.5e-4:
        return f"{seconds * 1e6:.3g} us"
    if size < 0.9995:
        return f"{seconds * 1e3:.1f} ms" if size < 0.01 else f"{seconds * 1e3:.0f} ms"
    if size >= 6000:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds:.0f} s" if size >= 99.5 else f"{seconds:.1f} s" if size >= 10 else f"{seconds:.2f} s"


def milliseconds(seconds: float) -> str:
    """Return seconds in milliseconds, however many, so that the figures of a table can be compared.

    Example:
        >>> milliseconds(2.5), milliseconds(0.0312), milliseconds(4.2e-5)
        ('2500 ms', '31.2 ms', '0.04 ms')
    """
    return f"{in_milliseconds(seconds)} ms"


def with_steps(seconds: float, factor: float) -> str:
    """Format a step and how many of it one exact step is worth."""
    return f"{milliseconds(seconds)} x {factor:.2f} steps"


def in_milliseconds(seconds: float) -> str:
    """Return the figure alone, for a column whose head says the unit."""
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def counted(count: int, one: str) -> str:
    """Return a number of things in words.

    Example:
        >>> counted(1, "worker"), counted(3, "worker")
        ('1 worker', '3 workers')
    """
    return f"{count} {one}" if count == 1 else f"{count} {one}s"


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


def megabytes(count: float | None) -> str:
    if count is None:
        return "-"
    return f"{count / 1e6:.2f}" if count < 10e6 else f"{count / 1e6:.1f}"


def volume(count: float | None) -> str:
    """Format bytes in MB, or kB if there are few, with the unit."""
    if count is None:
        return "-"
    return f"{count / 1e3:.3g} kB" if count < 10e3 else f"{megabytes(count)} MB"


def factor(value: float) -> str:
    return f"{value:.0f}×" if value >= 99.5 else f"{value:.1f}×" if value >= 9.95 else f"{value:.2f}×"


def times(value: float) -> str:
    """Format a ratio with two digits, and three from 1 to 2, where small gains differ.

    Example:
        >>> times(0.0583), times(0.4), times(1.502), times(3.14), times(26.2)
        ('0.058', '0.40', '1.50', '3.1', '26')
    """
    if value >= 2:
        return f"{value:.0f}" if value >= 10 else f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:#.2g}"
