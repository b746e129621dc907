"""Seconds, bytes and rates as texts for people."""

from __future__ import annotations

from thinwire.core.words import duration, rate

__all__ = ["bits", "duration", "factor", "megabytes", "milliseconds", "rate", "run_seconds", "seconds", "volume"]


def seconds(value: float | None) -> str:
    """Format the seconds of a step: ``1.20 s``, ``55 ms``, ``3.1 ms``."""
    if value is None:
        return "-"
    if abs(value) >= 0.9995:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if abs(value) < 0.01 else f"{value * 1e3:.0f} ms"


def run_seconds(value: float) -> str:
    """Format the duration of a training run: ``2.5 h``, ``310 s``, ``12.3 s``."""
    if value >= 6000:
        return f"{value / 3600:.1f} h"
    return f"{value:.0f} s" if value >= 99.5 else f"{value:.1f} s" if value >= 10 else seconds(value)


def milliseconds(value: float) -> str:
    ms = value * 1e3
    return f"{ms:.0f}" if ms >= 99.95 else f"{ms:.1f}" if ms >= 9.995 else f"{ms:.2f}"


def megabytes(count: float | None) -> str:
    if count is None:
        return "-"
    return f"{count / 1e6:.2f}" if count < 10e6 else f"{count / 1e6:.1f}"


def volume(count: float | None) -> str:
    """Format bytes in MB, or kB if there are few, with the unit."""
    if count is None:
        return "-"
    return f"{count / 1e3:.3g} kB" if count < 10e3 else f"{megabytes(count)} MB"


def bits(bits_per_second: float) -> str:
    return rate(bits_per_second / 8)


def factor(value: float) -> str:
    return f"{value:.0f}×" if value >= 99.5 else f"{value:.1f}×" if value >= 9.95 else f"{value:.2f}×"
